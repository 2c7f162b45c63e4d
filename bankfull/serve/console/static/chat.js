// The playground: one streamed conversation, with the speed of each response beside its limit.

import { Problem, events, json, post } from "./api.js";
import { find, make } from "./dom.js";
import { count, figure, percent, seconds } from "./format.js";
import { lineOf, listen } from "./state.js";

const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "frequency_penalty",
];
const turns = []; // {role, content, place}: the API's message, and its element
let writing = null; // aborts the response that is being streamed
let asker = null; // the button that started it, which gets the focus back
let server = null; // start time of the server whose models are listed

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
  // Listen on the document, because a button loses the focus when it is disabled.
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !find("#chat").hidden && !find("dialog[open]")) writing?.abort();
  });
  find("#stop").addEventListener("click", () => writing?.abort());
  find("#regenerate").addEventListener("click", regenerate);
  find("#clear").addEventListener("click", clear);
  // Open on wide screens, closed on narrow ones.
  find("#parameters").open = matchMedia("(min-width: 60rem)").matches;
  update();
  listen(({ now }) => {
    if (now && now.started !== server) loadModels(now.started);
  });
}

/** Load the model list when the page opens and when another server has taken over. */
async function loadModels(started) {
  server = started;
  try {
    const models = (await json("/v1/models")).data;
    find("#model").replaceChildren(...models.map((model) => make("option", { value: model.id }, model.id)));
    const defaults = models[0]?.sampling_defaults ?? {};
    for (const name of NUMBERS) if (name in defaults) find(`#${name}`).placeholder = defaults[name];
  } catch (error) {
    server = null; // retry with the next state
    find("#chat-status").textContent = error.message;
  }
}

function update() {
  const busy = writing !== null, focused = document.activeElement;
  find("#send").disabled = busy;
  find("#stop").disabled = !busy;
  find("#regenerate").disabled = busy || turns.at(-1)?.role !== "assistant";
  find("#clear").disabled = busy || turns.length === 0;
  find("#log").setAttribute("aria-busy", busy);
  if (busy) asker = focused?.disabled ? focused : null;
  if (!focused?.disabled) return;
  // A disabled button loses the focus: move it to the button that is useful now, and back afterwards.
  const next = busy ? find("#stop") : asker;
  (next && !next.disabled ? next : find("#question")).focus();
}

function send() {
  const question = find("#question"), text = question.value.trim();
  if (!text) return;
  question.value = "";
  const place = make("article", { class: "turn user" }, make("h2", {}, "You"), make("div", { class: "text" }, text));
  turns.push({ role: "user", content: text, place });
  find("#log").append(place);
  answer();
}

function regenerate() {
  if (writing || turns.at(-1)?.role !== "assistant") return;
  const { place } = turns.pop();
  while (place.nextElementSibling) place.nextElementSibling.remove(); // messages without a response
  place.remove();
  answer();
}

function clear() {
  turns.length = 0;
  find("#log").replaceChildren();
  update();
  find("#question").focus();
}

/** The parameters that the user has set, by their API names. */
function parameters() {
  const chosen = {};
  for (const name of NUMBERS) if (find(`#${name}`).value !== "") chosen[name] = Number(find(`#${name}`).value);
  if (find("#stop_text").value) chosen.stop = find("#stop_text").value;
  if (find("#explain").checked) chosen.explain = true;
  return chosen;
}

/** Apply a change that lengthens the log. Keep the scroll position, or stay at the end if the user is there. */
function lengthen(log, change) {
  const low = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (low) log.scrollTop = log.scrollHeight;
}

/** Text that grows at the end, laid out at most once per frame. */
class Growing {
  constructor(log) {
    this.log = log;
    this.element = make("div", { class: "text" });
    this.node = this.element.appendChild(document.createTextNode(""));
    this.complete = this.fresh = "";
  }

  add(text) {
    if (!this.fresh) requestAnimationFrame(() => this.flush());
    this.complete += text;
    this.fresh += text;
  }

  flush() {
    lengthen(this.log, () => this.node.appendData(this.fresh));
    this.fresh = "";
  }
}

/** The tokens of a response as they were drafted: accepted drafts are underlined, rejected ones struck through before
    the token that replaced them. */
class DraftView {
  constructor(log) {
    this.log = log;
    this.drafted = this.accepted = this.steps = 0;
    this.tokens = make("div", { class: "tokens" });
    this.summary = make("summary", {}, "Draft tokens");
    this.element = make("details", { class: "drafts", open: true, hidden: true }, this.summary, this.tokens);
  }

  add({ tokens, accepted, rejected, verified }) {
    const said = tokens.slice(0, accepted), replaced = rejected.join("");
    const next = tokens.slice(accepted).join("");
    const pieces = said.map((token) => make("ins", { class: "accepted", title: "accepted draft" }, token));
    if (replaced) {
      pieces.push(make("del", { class: "rejected", title: `rejected draft, replaced by “${next}”` }, replaced));
    }
    pieces.push(make("span", {}, next));
    this.steps += 1;
    this.accepted += accepted;
    this.drafted += verified;
    lengthen(this.log, () => {
      this.element.hidden = false;
      this.tokens.append(...pieces);
      const share = this.drafted ? `${count(this.accepted)} of ${count(this.drafted)} drafts accepted` : "no drafts";
      this.summary.textContent = `Draft tokens: ${count(this.steps)} steps, ${share}`;
    });
  }
}

async function answer() {
  const id = `console-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;
  const log = find("#log"), thought = new Growing(log), text = new Growing(log), figures = make("footer");
  const drafts = new DraftView(log);
  const title = make("summary", {}, "Reasoning");
  const thinking = make("details", { class: "thinking", hidden: true }, title, thought.element);
  const place = make("article", { class: "turn assistant" }, make("h2", {}, "Model"), thinking, text.element,
    drafts.element, figures);
  log.append(place);
  log.scrollTop = log.scrollHeight;
  const stopping = (writing = new AbortController());
  update();
  const seen = { begun: performance.now(), first: null, tokens: null, why: null };
  let problem = null;
  try {
    for await (const event of events(await ask(id, stopping.signal))) {
      if (event.error) throw new Problem(event.error.message, 0);
      seen.tokens = event.usage?.completion_tokens ?? seen.tokens;
      seen.why = event.explain?.summary ?? seen.why;
      const { reasoning, content } = event.choices[0]?.delta ?? {};
      if (event.choices[0]?.drafts) drafts.add(event.choices[0].drafts);
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
  if (problem !== null) {
    lengthen(log, () => figures.append(make("p", { class: "problem", role: "alert" }, problem)));
  }
  if (!text.complete && (problem !== null || stopped)) {
    // A message without a response is not part of the conversation; put it back into the input field.
    const unanswered = turns.pop();
    find("#question").value ||= unanswered.content;
  } else {
    turns.push({ role: "assistant", content: text.complete, place });
  }
  if (!text.complete && problem === null) text.element.append(make("em", {}, stopped ? "stopped" : "empty response"));
  update();
  if (seen.first !== null) {
    const shown = await figuresOf(id, seen, stopped);
    lengthen(log, () => figures.prepend(...shown));
  }
}

function ask(id, signal) {
  const system = find("#system").value.trim(), messages = turns.map(({ role, content }) => ({ role, content }));
  const body = {
    model: find("#model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    ...parameters(), stream: true,
    stream_options: { include_usage: true, ...(find("#drafts").checked ? { include_drafts: true } : {}) },
  };
  return post("/v1/chat/completions", body, { signal, headers: { "x-request-id": id } });
}

/** Times and speed as the server measured them, with their limits; otherwise as measured here. */
async function figuresOf(id, seen, stopped) {
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
  else if (line?.outcome === "length") items.push(["ended", "at max tokens", null]);
  const values = items.map(([name, value]) => `${name} ${value}`).join(", ");
  find("#chat-status").textContent = `Response complete. ${values}.`;
  const list = make("dl", { class: "figures" }, ...items.map(([name, value, beside]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, beside ? make("small", {}, ` ${beside}`) : null))));
  return seen.why ? [list, make("p", { class: "why" }, seen.why)] : [list];
}
