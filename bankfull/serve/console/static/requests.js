// The table of requests: running ones, then ended ones, each with its time line.

import { PARTS, timeLine } from "./charts.js";
import { find, make } from "./dom.js";
import { clock, count, figure, percent, seconds } from "./format.js";

const SHOWN = 100;
const PROBLEMS = new Set(["error", "abort", "left", "EngineDied", "Unavailable", "DeadlineExceeded", "RequestError"]);

export function requestsPage() {
  find("#parts").append(...PARTS.map(([part, name]) => make("span", { class: `name part-${part}` }, name)));
  const body = find("#lines tbody");
  return (state) => {
    const ended = [...state.lines.values()].sort((a, b) => b.number - a.number);
    const running = [...state.running].sort((a, b) => b.arrived - a.arrived);
    const lines = [...running, ...ended].slice(0, SHOWN);
    const longest = Math.max(1e-6, ...lines.map((line) => line.seconds));
    // Do not redraw while the user has selected text in the table.
    if (!selectedIn(body)) body.replaceChildren(...lines.map((line) => row(line, longest)));
    find("#no-lines").hidden = lines.length > 0;
  };
}

function selectedIn(place) {
  const selection = getSelection();
  return !selection.isCollapsed && place.contains(selection.anchorNode);
}

function row(line, longest) {
  const share = line.tokens_per_s && line.tokens_per_s_limit ? line.tokens_per_s / line.tokens_per_s_limit : null;
  const kind = line.number ? (PROBLEMS.has(line.outcome) ? "bad" : "ended") : "busy";
  const who = line.key ? `${line.id} · ${line.key}` : line.id;
  const name = line.batch ? `batch line, ${line.route}` : line.route;
  return make(
    "tr", { "data-id": line.id || null },
    cell("Started", clock(line.arrived)),
    make("td", { "data-name": "Request" }, name, make("small", { title: who }, who)),
    make("td", { "data-name": "State" }, make("span", { class: `badge ${kind}` }, line.outcome)),
    cell("Prompt tokens", count(line.prompt_tokens), "figure"),
    cell("cached", line.number ? count(line.cached_tokens) : "–", "figure"),
    cell("Output", count(line.output_tokens), "figure"),
    cell("TTFT", seconds(line.first_token), "figure"),
    cell("Tokens/s", figure(line.tokens_per_s), "figure"),
    cell("of limit", percent(share), "figure"),
    make("td", { "data-name": "Time line", class: "line" }, timeLine(line, longest)),
    cell("Seconds", figure(line.seconds), "figure"),
  );
}

function cell(name, text, kind = null) {
  return make("td", { "data-name": name, class: kind }, text);
}
