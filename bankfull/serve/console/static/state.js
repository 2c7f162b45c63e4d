// Asks the server once a second how it is, and keeps the last minutes: what happened between two answers is a sample.

import { json } from "./api.js";

const EVERY = 1000;
const KEPT_SAMPLES = 300;
const KEPT_LINES = 250;
const HITS_SECONDS = 30; // prompts come one by one: a second tells little about the cache
const listeners = new Set();

export const state = {
  now: null, // the last answer
  samples: [], // oldest first
  lines: new Map(), // requests that have ended, by number
  running: [],
  problem: null,
};

let before = null;
let timer = null;
let pending = null;

/** `listener` is called after each answer, and after each failure. */
export function listen(listener) {
  listeners.add(listener);
}

export function start() {
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  refresh();
}

/** Ask now; whoever asks while a question is on its way gets that one's answer. */
export function refresh() {
  pending ??= ask().finally(() => {
    pending = null;
    clearTimeout(timer);
    // Who was asked for a key and gave none is not asked again every second.
    if (state.problem?.status !== 401) timer = setTimeout(() => document.hidden || refresh(), EVERY);
  });
  return pending;
}

/** The ended line of a request of ours, once the server has it. */
export async function lineOf(id) {
  for (let attempt = 0; attempt < 5; attempt++) {
    await refresh();
    const found = [...state.lines.values()].find((line) => line.id === id);
    if (found) return found;
    await new Promise((resolve) => setTimeout(resolve, 150));
  }
  return null;
}

async function ask() {
  try {
    take(await json(`/console/state?after=${state.now ? state.now.last : 0}`));
    state.problem = null;
  } catch (error) {
    state.problem = error;
  }
  for (const listener of listeners) listener(state);
}

function take(answer) {
  if (state.now && answer.started !== state.now.started) {
    state.lines.clear();
    state.samples.length = 0; // its clock was another one
    before = null;
    answer.last = 0;
  }
  state.now = answer;
  state.running = answer.requests.filter((line) => !line.number);
  for (const line of answer.requests) if (line.number) state.lines.set(line.number, line);
  const oldest = [...state.lines.keys()].sort((a, b) => a - b).slice(0, -KEPT_LINES);
  for (const number of oldest) state.lines.delete(number);
  const sample = between(before, answer);
  if (sample) {
    state.samples.push(sample);
    sample.hits = hitsOf(state.samples.filter((other) => sample.at - other.at < HITS_SECONDS));
  }
  state.samples.splice(0, state.samples.length - KEPT_SAMPLES);
  before = answer;
}

const EMPTY = {
  steps: 0, busy: 0, bytes_moved: 0, flops: 0, decode_busy: 0, decode_bytes: 0, decode_flops: 0, prefix_queries: 0,
  prefix_hits: 0,
};

/** What the engine did between two answers; null where it was started again. */
export function between(first, second) {
  if (!first || second.clock <= first.clock) return null;
  const seconds = second.clock - first.clock;
  const from = first.load ?? EMPTY, to = second.load ?? EMPTY;
  if (to.steps < from.steps) return null;
  const passed = Object.fromEntries(Object.keys(EMPTY).map((name) => [name, to[name] - from[name]]));
  const decode = { seconds: passed.decode_busy, bytes: passed.decode_bytes, flops: passed.decode_flops };
  const prompt = {
    seconds: passed.busy - decode.seconds, bytes: passed.bytes_moved - decode.bytes,
    flops: passed.flops - decode.flops,
  };
  const ceilings = second.facts?.ceilings ?? null;
  const least = ceilings ? leastSeconds(decode, ceilings) + leastSeconds(prompt, ceilings) : null;
  return {
    at: second.clock,
    running: second.load?.running ?? 0,
    waiting: second.load?.waiting ?? 0,
    generated: (second.generation_tokens - first.generation_tokens) / seconds,
    read: (second.prompt_tokens - first.prompt_tokens) / seconds,
    pages: second.load?.pages_total ? second.load.pages_used / second.load.pages_total : 0,
    queried: passed.prefix_queries,
    found: passed.prefix_hits,
    step: passed.steps ? passed.busy / passed.steps : null,
    limit: passed.steps && least ? least / passed.steps : null,
    busy: Math.min(1, passed.busy / seconds),
    decode, prompt,
  };
}

/** Of the prompt tokens looked for in all these samples, the share that was found; null where none were. */
function hitsOf(samples) {
  const sum = (name) => samples.reduce((total, sample) => total + sample[name], 0);
  return sum("queried") ? sum("found") / sum("queried") : null;
}

/** The shortest time for work of one kind: bound by its bytes or by its arithmetic. */
export function leastSeconds(work, ceilings) {
  return Math.max(work.bytes / ceilings.read_bytes_per_s, work.flops / (ceilings.flops ?? Infinity));
}
