// The page with live charts.

import { Roofline, TimeChart } from "./charts.js";
import { find, make } from "./dom.js";
import { count, figure, percent, seconds, sized } from "./format.js";
import { leastSeconds } from "./state.js";

const CHARTS = [
  {
    title: "Requests", format: count,
    series: [{ name: "running", of: (sample) => sample.running }, { name: "waiting", of: (sample) => sample.waiting }],
  },
  {
    title: "Tokens per second", format: figure,
    series: [{ name: "generated", of: (sample) => sample.generated }, { name: "prompt", of: (sample) => sample.read }],
  },
  {
    title: "Step time", format: seconds,
    series: [
      { name: "step", of: (sample) => sample.step }, { name: "limit", of: (sample) => sample.limit, limit: true },
    ],
  },
  { title: "KV cache pages in use", format: percent, top: 1, series: [{ name: "used", of: (sample) => sample.pages }] },
  {
    title: "Prefix cache hits", format: percent, top: 1,
    series: [{ name: "prompt tokens found, last 30 s", of: (sample) => sample.hits }],
  },
  { title: "Engine busy", format: percent, top: 1, series: [{ name: "busy", of: (sample) => sample.busy }] },
];

export function livePage() {
  const host = find("#charts");
  const roofline = new Roofline(find("#roofline"));
  const charts = CHARTS.map((options) => {
    const card = make("figure", { class: "card" });
    host.append(card);
    return new TimeChart(card, options);
  });
  return (state) => {
    const ceilings = state.now?.facts?.ceilings ?? null;
    find("#roofline").hidden = !ceilings;
    const replicas = state.now?.replicas ?? [];
    find("#unmeasured").hidden = !state.now?.facts || Boolean(ceilings) || replicas.length > 1;
    find("#replicas").hidden = replicas.length < 2;
    find("#replicas tbody").replaceChildren(...replicas.map(replicaRow));
    find("#doubtful").hidden = !doubtful(state.samples);
    find("#tiles").replaceChildren(...tiles(state, ceilings));
    if (ceilings) roofline.show(ceilings, state.samples);
    for (const chart of charts) chart.show(state.samples);
  };
}

function replicaRow(replica) {
  const { load } = replica;
  const figures = [
    ["Running", load ? `${count(load.running)} of ${count(replica.rows)}` : "–"],
    ["Waiting", count(load?.waiting)],
    ["KV cache pages", percent(load?.pages_total ? load.pages_used / load.pages_total : null)],
    ["Prefix hits", percent(replica.hit_rate)],
    ["Restarts", count(replica.restarts)],
    ["Resumed elsewhere", count(replica.resumed)],
  ];
  return make(
    "tr", {},
    ...["name", "state", "device"].map((name) => make("td", { "data-name": name }, replica[name])),
    ...figures.map(([name, value]) => make("td", { "data-name": name, class: "figure" }, value)),
  );
}

/** Whether the last steps clearly beat their limit, which means that the limit was measured badly. */
function doubtful(samples) {
  const last = samples.slice(-30).filter((sample) => sample.step !== null && sample.limit !== null);
  const sum = (name) => last.reduce((total, sample) => total + sample[name], 0);
  return last.length >= 5 && sum("limit") > 1.05 * sum("step");
}

function tiles(state, ceilings) {
  const { facts, load } = state.now ?? {}, latest = state.samples.at(-1);
  if (!facts || !latest) return [];
  const shares = ["decode", "prompt"].map((kind) => {
    const work = latest[kind];
    return ceilings && work.seconds > 0 ? leastSeconds(work, ceilings) / work.seconds : null;
  });
  const moved = latest.decode.bytes + latest.prompt.bytes, inside = latest.decode.seconds + latest.prompt.seconds;
  return [
    ["Running", `${count(latest.running)} of ${count(facts.rows)}`],
    ["Waiting", count(latest.waiting)],
    ["Generated", `${figure(latest.generated)} tokens/s`],
    ["KV cache pages", load ? `${count(load.pages_used)} of ${count(load.pages_total)}` : "–"],
    ["Decode, of limit", percent(shares[0])],
    ["Prefill, of limit", percent(shares[1])],
    ["Memory traffic", sized(ceilings && latest.busy ? moved / inside : null, "B/s")],
    ["Preemptions", count(load?.preemptions ?? 0)],
  ].map(([name, value]) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, value)));
}
