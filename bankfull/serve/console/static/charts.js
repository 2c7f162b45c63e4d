// Charts as plain SVG, redrawn for each sample: time charts, the roofline, and the time line of a request.
// Colours are classes; style.css defines them for light and dark.

import { draw, make } from "./dom.js";
import { figure, percent, seconds, sized } from "./format.js";

const HEIGHT = 150;
const LONGEST = 300;
const SHORTEST = 60;
const MARGIN = { left: 50, right: 10, top: 8, bottom: 20 };

/** Ticks of an axis that starts at 0: a few round numbers. */
export function ticks(top, wanted = 3) {
  if (!(top > 0)) return [0, 1];
  const rough = top / wanted, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * size).find((candidate) => candidate >= rough * 0.999);
  const found = [0];
  while (found.at(-1) < top * 0.999) found.push(Number((found.length * step).toPrecision(12)));
  return found;
}

/** A path through the points, interrupted at missing values. A single point is a dot. */
function pathOf(points) {
  let path = "", open = false;
  for (const [x, y] of points) {
    if (y === null) {
      open = false;
      continue;
    }
    const at = `${x.toFixed(1)} ${y.toFixed(1)}`;
    path += open ? `L${at}` : `M${at}h0`;
    open = true;
  }
  return path;
}

function look(series, number) {
  return `series-${series.limit ? "limit" : number}`;
}

/** A few values over the last minutes. Arrow keys or the pointer select a sample, whose values are then shown. */
export class TimeChart {
  /** `series`: {name, of: sample => number or null, limit: whether it is a limit}; `top`: end of the axis, if fixed. */
  constructor(host, { title, series, format, top = null }) {
    Object.assign(this, { title, series, format, top, samples: [], picked: null });
    this.value = make("output", { class: "value" });
    this.svg = draw("svg", { class: "chart", role: "img", tabindex: "0", height: HEIGHT });
    const names = series.map((one, number) => make("span", { class: `name ${look(one, number)}` }, one.name));
    const caption = make("figcaption", {}, make("h2", {}, title), this.value);
    host.append(caption, this.svg, make("p", { class: "legend" }, ...names));
    this.svg.addEventListener("pointermove", (event) => this.pick(this.nearest(event)));
    this.svg.addEventListener("pointerleave", () => this.pick(null));
    this.svg.addEventListener("blur", () => this.pick(null));
    this.svg.addEventListener("keydown", (event) => this.move(event));
  }

  show(samples) {
    this.samples = samples;
    const width = this.svg.clientWidth || 320;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const last = samples.at(-1)?.at ?? 0;
    const span = Math.min(LONGEST, Math.max(SHORTEST, last - (samples[0]?.at ?? last)));
    this.shown = samples.filter((sample) => sample.at >= last - span);
    const values = this.shown.flatMap((sample) => this.series.map((one) => one.of(sample) ?? 0));
    const borders = ticks(this.top ?? Math.max(0, ...values));
    const top = borders.at(-1);
    this.x = (at) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * (1 - (last - at) / span);
    this.y = (value) => HEIGHT - MARGIN.bottom - (HEIGHT - MARGIN.top - MARGIN.bottom) * (value / top);
    const parts = borders.flatMap((value) => [
      draw("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: this.y(value), y2: this.y(value) }),
      text(MARGIN.left - 6, this.y(value) + 4, "end", this.format(value)),
    ]);
    parts.push(
      text(MARGIN.left, HEIGHT - 4, "start", `${Math.round(span / 60) || 1} min ago`),
      text(width - MARGIN.right, HEIGHT - 4, "end", "now"),
    );
    this.series.forEach((one, number) => {
      const points = this.shown.map((sample) => {
        const value = one.of(sample);
        return [this.x(sample.at), value === null ? null : this.y(Math.min(value, top))];
      });
      parts.push(draw("path", { class: `curve ${look(one, number)}`, d: pathOf(points) }));
    });
    this.marker = draw("line", { class: "marker", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    this.svg.replaceChildren(...parts, this.marker);
    this.describe();
  }

  nearest(event) {
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const distance = (sample) => Math.abs(this.x(sample.at) - at);
    return this.shown.reduce((best, sample) => (!best || distance(sample) < distance(best) ? sample : best), null);
  }

  move(event) {
    const at = this.picked ? this.shown.indexOf(this.picked) : this.shown.length;
    const wanted = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.shown.length - 1 }[event.key];
    if (event.key === "Escape") return this.pick(null);
    if (wanted === undefined) return;
    event.preventDefault();
    this.pick(this.shown[Math.min(Math.max(0, wanted), this.shown.length - 1)] ?? null);
  }

  pick(sample) {
    this.picked = sample;
    this.describe();
  }

  describe() {
    if (!this.shown?.includes(this.picked)) this.picked = null;
    const sample = this.picked ?? this.shown?.at(-1);
    const figures = sample ? this.series.map((one) => `${one.name} ${this.format(one.of(sample))}`) : [];
    const description = figures.join(", ") || "no values yet";
    const when = this.picked ? `${Math.round(this.shown.at(-1).at - sample.at)} s ago: ` : "";
    this.value.textContent = when + description;
    this.svg.setAttribute("aria-label", `${this.title}. ${when || "Now: "}${description}. Arrow keys go back in time.`);
    this.marker?.setAttribute("visibility", this.picked ? "visible" : "hidden");
    if (this.picked) for (const end of ["x1", "x2"]) this.marker.setAttribute(end, this.x(sample.at));
  }
}

const ROOF_HEIGHT = 300;
const TRAIL_SECONDS = 30;
const NOW_SECONDS = 2.5;
const KINDS = [["decode", "decode"], ["prompt", "prefill"]];

/** The machine's peak at each arithmetic intensity, and the operating points of the engine's last steps below it. */
export class Roofline {
  constructor(host) {
    this.value = make("output", { class: "value" });
    this.svg = draw("svg", { class: "chart roof", role: "img", height: ROOF_HEIGHT });
    const names = KINDS.map(([kind, name]) => make("span", { class: `name point-${kind}` }, name));
    const hint = make("span", { class: "hint" }, "large: now; small: the last 30 seconds");
    host.append(
      make("figcaption", {}, make("h2", {}, "Roofline"), this.value), this.svg,
      make("p", { class: "legend" }, ...names, hint),
    );
  }

  show(ceilings, samples) {
    const width = this.svg.clientWidth || 640, peak = ceilings.flops ?? Infinity, slope = ceilings.read_bytes_per_s;
    const ridge = peak / slope, flat = Number.isFinite(peak), roof = (intensity) => Math.min(peak, slope * intensity);
    const trails = KINDS.map(([kind]) => recent(samples, kind)), points = trails.flat();
    const low = Math.min(0.25, ...points.map((point) => point.x)) / 2;
    // Without a measured compute peak there is no flat roof: the bandwidth line continues.
    const high = Math.max(flat ? ridge * 16 : 64, ...points.map((point) => point.x * 2));
    const bottom = Math.min(roof(low), ...points.map((point) => point.y)) / 2, top = roof(high) * 3;
    const x = scale(low, high, MARGIN.left + 14, width - MARGIN.right);
    const y = scale(bottom, top, ROOF_HEIGHT - 36, MARGIN.top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${ROOF_HEIGHT}`);
    const corners = [low, ...(flat ? [ridge] : []), high];
    const path = pathOf(corners.map((at) => [x(at), y(roof(at))]));
    const parts = [
      ...axes(x, y, { low, high, bottom, top }),
      draw("path", { class: "curve series-limit", d: path }),
      text(x(high) - 4, y(roof(high)) - 6, "end", `compute ${flat ? sized(peak, "FLOP/s") : "not measured"}`),
      text(x(2 * low) + 8, y(roof(2 * low)) + 10, "start", `memory ${sized(slope, "B/s")}`),
    ];
    const description = [];
    KINDS.forEach(([kind, name], number) => {
      for (const point of trails[number]) {
        const share = point.y / roof(point.x);
        const label = `${name} at ${percent(share)} of the limit (${figure(point.x)} operations per byte)`;
        const look = point.now ? { r: 7 } : { r: 3, opacity: 0.15 + 0.4 * (1 - point.age / TRAIL_SECONDS) };
        const place = { class: `point point-${kind}`, cx: x(point.x), cy: y(point.y), ...look };
        parts.push(draw("circle", place, draw("title", {}, label)));
        if (!point.now) continue;
        description.push(label);
        const gap = { x1: x(point.x), x2: x(point.x), y1: y(point.y) - 8, y2: y(roof(point.x)) };
        const beside = kind === "decode" ? [-11, "end"] : [11, "start"];
        parts.push(
          draw("line", { class: `gap point-${kind}`, ...gap }),
          text(x(point.x) + beside[0], y(point.y) + 4, beside[1], percent(share), "label"),
        );
      }
    });
    this.svg.replaceChildren(...parts);
    this.value.textContent = description.join("; ") || "idle";
    this.svg.setAttribute("aria-label", `Roofline. ${this.value.textContent}.`);
  }
}

/** The recent operating points of a kind of step, oldest first; the last one is marked `now` if it is recent. */
export function recent(samples, kind) {
  const last = samples.at(-1)?.at ?? 0;
  const found = samples
    .filter((sample) => last - sample.at < TRAIL_SECONDS)
    .filter(({ [kind]: work }) => work.seconds > 0 && work.bytes > 0 && work.flops > 0)
    .map(({ at, [kind]: work }) => ({ x: work.flops / work.bytes, y: work.flops / work.seconds, age: last - at }));
  if (found.at(-1)?.age < NOW_SECONDS) found.at(-1).now = true;
  return found;
}

function axes(x, y, { low, high, bottom, top }) {
  const across = decades(low, high), up = decades(bottom, top);
  return [
    ...across.map((at) => draw("line", { class: "grid", x1: x(at), x2: x(at), y1: y(top), y2: y(bottom) })),
    ...up.map((at) => draw("line", { class: "grid", x1: x(low), x2: x(high), y1: y(at), y2: y(at) })),
    ...across.map((at) => text(x(at), ROOF_HEIGHT - 20, "middle", figure(at))),
    ...up.map((at) => text(x(low) - 6, y(at) + 4, "end", sized(at, ""))),
    text((x(low) + x(high)) / 2, ROOF_HEIGHT - 4, "middle", "operations per byte"),
    text(x(low) + 6, y(top) + 12, "start", "operations per second"),
  ];
}

function text(x, y, anchor, content, kind = "tick") {
  return draw("text", { class: kind, x, y, "text-anchor": anchor }, content);
}

function scale(low, high, from, to) {
  const span = Math.log(high / low);
  return (value) => from + ((to - from) * Math.log(value / low)) / span;
}

function decades(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low)); 10 ** power <= high; power++) found.push(10 ** power);
  return found;
}

export const PARTS = [
  ["prepare", "preparing"], ["queue", "queued"], ["prompt", "prefill"], ["wait", "queued or prefill"],
  ["decode", "decode"],
];

/** The phases of a request as a bar; `longest` seconds take the whole width. */
export function timeLine(line, longest) {
  const parts = [], label = [];
  let at = 0;
  for (const [part, name] of PARTS) {
    const length = line[part];
    if (length === null || length <= 0) continue;
    label.push(`${name} ${seconds(length)}`);
    const place = { x: (1000 * at) / longest, width: Math.max(2, (1000 * length) / longest), y: 1, height: 12 };
    parts.push(draw("rect", { class: `part-${part}`, ...place }));
    at += length;
  }
  const description = label.join(", ") || "nothing yet";
  return draw(
    "svg",
    { class: "time-line", viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img", "aria-label": description },
    draw("title", {}, description), ...parts,
  );
}
