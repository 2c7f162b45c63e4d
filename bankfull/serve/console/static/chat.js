// The playground: one conversation, streamed, with the figures of each answer beside their limit.

import { Problem, events, json, post } from "./api.js";
import { find, make } from "./dom.js";
import { count, figure, percent, seconds } from "./format.js";
import { lineOf } from "./state.js";

const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "frequency_penalty",
];
const turns = []; // {role, content}, as the API takes them
let writing = null; // what stops the answer that is being written

export function chatPage() {
  const question = find("#question");
  find("#ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!writing) send();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      find("#ask").requestSubmit();
    }
  });
  find("#chat").addEventListener("keydown", (event) => event.key === "Escape" && writing?.abort());
  find("#stop").addEventListener("click", () => writing?.abort());
  find("#regenerate").addEventListener("click", regenerate);
  find("#clear").addEventListener("click", clear);
  // Beside the conversation where there is room, behind a click where there is not.
  find("#parameters").open = matchMedia("(min-width: 60rem)").matches;
  update();
  loadModels();
}

async function loadModels() {
  try {
    const models = (await json("/v1/models")).data;
    find("#model").replaceChildren(...models.map((model) => make("option", { value: model.id }, model.id)));
    const defaults = models[0]?.sampling_defaults ?? {};
    for (const name of NUMBERS) if (name in defaults) find(`#${name}`).placeholder = defaults[name];
  } catch (error) {
    find("#said").textContent = error.message;
  }
}

function update() {
  const busy = writing !== null;
  find("#send").disabled = busy;
  find("#stop").disabled = !busy;
  find("#regenerate").disabled = busy || turns.at(-1)?.role !== "assistant";
  find("#clear").disabled = busy || turns.length === 0;
  find("#log").setAttribute("aria-busy", busy);
}

function send() {
  const question = find("#question"), text = question.value.trim();
  if (!text) return;
  question.value = "";
  turns.push({ role: "user", content: text });
  const place = make("article", { class: "turn user" }, make("h2", {}, "You"), make("div", { class: "text" }, text));
  find("#log").append(place);
  answer();
}

function regenerate() {
  if (writing || turns.at(-1)?.role !== "assistant") return;
  turns.pop();
  find("#log").lastElementChild.remove();
  answer();
}

function clear() {
  turns.length = 0;
  find("#log").replaceChildren();
  update();
  find("#question").focus();
}

/** What the user has set, under the API's names. */
function parameters() {
  const chosen = {};
  for (const name of NUMBERS) if (find(`#${name}`).value !== "") chosen[name] = Number(find(`#${name}`).value);
  if (find("#stop_text").value) chosen.stop = find("#stop_text").value;
  if (find("#explain").checked) chosen.explain = true;
  return chosen;
}

/** Text that grows at the end. It is laid out once a frame, however fast tokens come. */
class Growing {
  constructor(log) {
    this.log = log;
    this.element = make("div", { class: "text" });
    this.node = this.element.appendChild(document.createTextNode(""));
    this.whole = this.fresh = "";
  }

  add(text) {
    if (!this.fresh) requestAnimationFrame(() => this.flush());
    this.whole += text;
    this.fresh += text;
  }

  flush() {
    const { log } = this, below = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    this.node.appendData(this.fresh);
    this.fresh = "";
    if (below) log.scrollTop = log.scrollHeight; // whoever reads further up stays there
  }
}

async function answer() {
  const id = `console-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;
  const log = find("#log"), thought = new Growing(log), text = new Growing(log), figures = make("footer");
  const title = make("summary", {}, "Reasoning");
  const thinking = make("details", { class: "thinking", hidden: true }, title, thought.element);
  log.append(make("article", { class: "turn assistant" }, make("h2", {}, "Model"), thinking, text.element, figures));
  log.scrollTop = log.scrollHeight;
  const stopping = (writing = new AbortController());
  update();
  const seen = { begun: performance.now(), first: null, tokens: null };
  let problem = null;
  try {
    for await (const event of events(await ask(id, stopping.signal))) {
      if (event.error) throw new Problem(event.error.message, 0);
      seen.tokens = event.usage?.completion_tokens ?? seen.tokens;
      if (event.explain?.summary) figures.append(make("p", { class: "why" }, event.explain.summary));
      const { reasoning, content } = event.choices[0]?.delta ?? {};
      if (reasoning || content) seen.first ??= performance.now();
      if (reasoning) {
        thinking.hidden = false;
        thought.add(reasoning);
      }
      if (content) text.add(content);
    }
  } catch (error) {
    if (error.name !== "AbortError") problem = error.message;
  }
  thought.flush();
  text.flush();
  seen.ended = performance.now();
  const stopped = stopping.signal.aborted;
  writing = null;
  if (problem !== null) figures.append(make("p", { class: "problem", role: "alert" }, problem));
  if (text.whole) turns.push({ role: "assistant", content: text.whole });
  else if (problem !== null) find("#question").value ||= turns.pop().content; // it may be sent again as it was
  else text.element.append(make("em", {}, stopped ? "stopped" : "nothing was said"));
  update();
  if (seen.first !== null) {
    await showFigures(figures, id, seen, stopped);
    log.scrollTop = log.scrollHeight;
  }
}

function ask(id, signal) {
  const system = find("#system").value.trim();
  const body = {
    model: find("#model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    ...parameters(), stream: true, stream_options: { include_usage: true },
  };
  return post("/v1/chat/completions", body, { signal, headers: { "x-request-id": id } });
}

/** As the server measured them, beside the limit of the same steps; where it does not tell, as they were seen here. */
async function showFigures(place, id, seen, stopped) {
  const line = await lineOf(id);
  const rate = line ? line.tokens_per_s : seen.tokens ? ((seen.tokens - 1) * 1000) / (seen.ended - seen.first) : null;
  const first = line?.first_token ?? (seen.first - seen.begun) / 1000;
  const limit = line?.tokens_per_s_limit ?? null;
  const prompt = line ? `prompt ${count(line.prompt_tokens)}, cached ${count(line.cached_tokens)}` : null;
  const items = [
    ["TTFT", seconds(first), line?.first_token_limit ? `limit ${seconds(line.first_token_limit)}` : null],
    ["speed", `${figure(rate)} tokens/s`, limit ? `limit ${figure(limit)}` : null],
    ["of limit", limit && rate ? percent(rate / limit) : "–", limit ? null : "run bankfull limits, then restart"],
    ["tokens", count(line?.output_tokens ?? seen.tokens), prompt],
  ];
  if (stopped) items.push(["ended", "stopped", null]);
  else if (line?.outcome === "length") items.push(["ended", "at the most tokens", null]);
  place.prepend(make("dl", { class: "figures" }, ...items.map(([name, value, beside]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, beside ? make("small", {}, ` ${beside}`) : null)))));
  find("#said").textContent = `Answered. ${items.map(([name, value]) => `${name} ${value}`).join(", ")}.`;
}
