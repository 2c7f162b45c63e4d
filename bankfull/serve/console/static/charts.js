// Charts as plain SVG, drawn anew for each sample: over time, the roofline, and a request's time line.
// Colours are classes; style.css has them for light and dark.

import { draw, make } from "./dom.js";
import { figure, percent, seconds, sized } from "./format.js";

const HEIGHT = 150;
const LONGEST = 300;
const SHORTEST = 60;
const MARGIN = { left: 50, right: 10, top: 8, bottom: 20 };

/** Borders of an axis that starts at 0: a few round numbers. */
export function ticks(top, wanted = 3) {
  if (!(top > 0)) return [0, 1];
  const rough = top / wanted, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * size).find((candidate) => candidate >= rough * 0.999);
  const found = [0];
  while (found.at(-1) < top * 0.999) found.push(Number((found.length * step).toPrecision(12)));
  return found;
}

/** A path through the points; where a value is missing it is interrupted. */
function pathOf(points) {
  let path = "", open = false;
  for (const [x, y] of points) {
    if (y === null) {
      open = false;
      continue;
    }
    path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    open = true;
  }
  return path;
}

/** The last minutes of a few figures. Arrow keys or the pointer choose a moment, whose figures are then told. */
export class TimeChart {
  /** `series`: {name, of: sample => number or null, limit: whether it is one}; `top`: where the axis ends, if that is fixed. */
  constructor(host, { title, series, format, top = null }) {
    Object.assign(this, { title, series, format, top, samples: [], picked: null });
    this.value = make("output", { class: "value" });
    this.svg = draw("svg", { class: "chart", role: "img", tabindex: "0", height: HEIGHT });
    const names = series.map((one, number) => make("span", { class: `name series-${one.limit ? "limit" : number}` }, one.name));
    host.append(make("figcaption", {}, make("h2", {}, title), this.value), this.svg, make("p", { class: "legend" }, ...names));
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
      draw("text", { class: "tick", x: MARGIN.left - 6, y: this.y(value) + 4, "text-anchor": "end" }, this.format(value)),
    ]);
    parts.push(
      draw("text", { class: "tick", x: MARGIN.left, y: HEIGHT - 4 }, `${Math.round(span / 60) || 1} min ago`),
      draw("text", { class: "tick", x: width - MARGIN.right, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
    );
    this.series.forEach((one, number) => {
      const points = this.shown.map((sample) => {
        const value = one.of(sample);
        return [this.x(sample.at), value === null ? null : this.y(Math.min(value, top))];
      });
      parts.push(draw("path", { class: `curve series-${one.limit ? "limit" : number}`, d: pathOf(points) }));
    });
    this.marker = draw("line", { class: "marker", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    this.svg.replaceChildren(...parts, this.marker);
    this.tell();
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
    this.tell();
  }

  tell() {
    if (!this.shown?.includes(this.picked)) this.picked = null;
    const sample = this.picked ?? this.shown?.at(-1);
    const said = sample ? this.series.map((one) => `${one.name} ${this.format(one.of(sample))}`).join(", ") : "no figures yet";
    const when = this.picked ? `${Math.round(this.shown.at(-1).at - sample.at)} s ago: ` : "";
    this.value.textContent = when + (this.series.length > 1 || !sample ? said : this.format(this.series[0].of(sample)));
    this.svg.setAttribute("aria-label", `${this.title}. ${when || "Now: "}${said}. Arrow keys go back in time.`);
    if (this.picked) {
      const x = this.x(sample.at);
      for (const [name, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) this.marker.setAttribute(name, value);
    } else {
      this.marker?.setAttribute("visibility", "hidden");
    }
  }
}

const ROOF_HEIGHT = 300;
const TRAIL = 30;
const KINDS = [["decode", "decoding"], ["prompt", "reading prompts"]];

/** What the machine can do at each intensity, and where the engine's steps of the last seconds lie below it. */
export class Roofline {
  constructor(host) {
    this.value = make("output", { class: "value" });
    this.svg = draw("svg", { class: "chart roof", role: "img", height: ROOF_HEIGHT });
    const names = KINDS.map(([kind, name]) => make("span", { class: `name point-${kind}` }, name));
    host.append(
      make("figcaption", {}, make("h2", {}, "Roofline"), this.value), this.svg,
      make("p", { class: "legend" }, ...names, make("span", { class: "hint" }, "the last 30 seconds with work; the large points are now")),
    );
  }

  show(ceilings, samples) {
    const width = this.svg.clientWidth || 640, peak = ceilings.flops, slope = ceilings.read_bytes_per_s;
    const ridge = peak / slope;
    const roof = (intensity) => Math.min(peak, slope * intensity);
    const points = KINDS.flatMap(([kind]) => recent(samples, kind));
    const low = Math.min(0.25, ...points.map((point) => point.x)) / 2, high = Math.max(ridge * 16, ...points.map((point) => point.x * 2));
    const bottom = Math.min(roof(low), ...points.map((point) => point.y)) / 2, top = peak * 3;
    const x = scale(low, high, MARGIN.left + 14, width - MARGIN.right), y = scale(bottom, top, ROOF_HEIGHT - 36, MARGIN.top);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${ROOF_HEIGHT}`);
    const parts = [
      ...decades(low, high).map((value) => draw("line", { class: "grid", x1: x(value), x2: x(value), y1: y(top), y2: y(bottom) })),
      ...decades(bottom, top).map((value) => draw("line", { class: "grid", x1: x(low), x2: x(high), y1: y(value), y2: y(value) })),
      ...decades(low, high).map((value) => draw("text", { class: "tick", x: x(value), y: ROOF_HEIGHT - 20, "text-anchor": "middle" }, figure(value))),
      ...decades(bottom, top).map((value) => draw("text", { class: "tick", x: x(low) - 6, y: y(value) + 4, "text-anchor": "end" }, sized(value, ""))),
      draw("text", { class: "tick", x: (x(low) + x(high)) / 2, y: ROOF_HEIGHT - 4, "text-anchor": "middle" }, "operations per byte"),
      draw("text", { class: "tick", x: x(low) + 6, y: y(top) + 12 }, "operations per second"),
      draw("path", { class: "curve series-limit", d: pathOf([[x(low), y(roof(low))], [x(ridge), y(peak)], [x(high), y(peak)]]) }),
      draw("text", { class: "tick", x: x(high) - 4, y: y(peak) - 6, "text-anchor": "end" }, `arithmetic ${sized(peak, "FLOP/s")}`),
      draw("text", { class: "tick", x: x(ridge) - 8, y: y(peak) - 6, "text-anchor": "end" }, `memory ${sized(slope, "B/s")}`),
    ];
    const said = [];
    for (const [kind, name] of KINDS) {
      const trail = recent(samples, kind);
      trail.forEach((point, number) => {
        const newest = number === trail.length - 1;
        const share = point.y / roof(point.x);
        const dot = { class: `point point-${kind}`, cx: x(point.x), cy: y(point.y), r: newest ? 7 : 3, opacity: newest ? 1 : 0.12 + (0.4 * number) / TRAIL };
        parts.push(draw("circle", dot, draw("title", {}, `${name}: ${sized(point.y, "FLOP/s")}, ${percent(share)} of the limit`)));
        if (!newest) return;
        said.push(`${name} at ${percent(share)} of the limit (${figure(point.x)} operations per byte)`);
        parts.push(
          draw("line", { class: `gap point-${kind}`, x1: x(point.x), x2: x(point.x), y1: y(point.y) - 8, y2: y(roof(point.x)) }),
          draw("text", { class: "label", x: x(point.x) + 11, y: y(point.y) + 4 }, percent(share)),
        );
      });
    }
    this.svg.replaceChildren(...parts);
    this.value.textContent = said.join("; ") || "idle";
    this.svg.setAttribute("aria-label", `Roofline. ${this.value.textContent}.`);
  }
}

/** The newest operating points of a kind of step, oldest first. */
export function recent(samples, kind) {
  return samples.slice(-TRAIL)
    .filter((sample) => sample[kind].seconds > 0 && sample[kind].bytes > 0 && sample[kind].flops > 0)
    .map((sample) => ({ x: sample[kind].flops / sample[kind].bytes, y: sample[kind].flops / sample[kind].seconds }));
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
  ["prepare", "prepared"], ["queue", "queued"], ["prompt", "prompt read"], ["decode", "decoded"],
];

/** A request's parts as a bar; `longest` is the whole width. */
export function timeLine(line, longest) {
  const parts = [], told = [];
  let at = 0;
  for (const [part, name] of PARTS) {
    const length = line[part];
    if (length === null || length <= 0) continue;
    told.push(`${name} ${seconds(length)}`);
    parts.push(draw("rect", { class: `part-${part}`, x: (1000 * at) / longest, width: Math.max(2, (1000 * length) / longest), y: 1, height: 12 }));
    at += length;
  }
  const said = told.join(", ") || "nothing yet";
  return draw(
    "svg", { class: "time-line", viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img", "aria-label": said },
    draw("title", {}, said), ...parts,
  );
}
