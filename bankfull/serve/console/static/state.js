// Polls the server's state once a second and keeps the last minutes. A sample is the difference of two responses.

import { json } from "./api.js";

const EVERY = 1000;
const KEPT_SAMPLES = 300;
const KEPT_LINES = 250;
const HITS_SECONDS = 30; // prompts are rare: one second is too short for a rate
const listeners = new Set();

export const state = {
  now: null, // the last response
  samples: [], // oldest first
  lines: new Map(), // requests that have ended, by number
  running: [],
  problem: null,
};

let before = null;
let timer = null;
let pending = null;

/** Call `listener` after each response and after each failure. */
export function listen(listener) {
  listeners.add(listener);
}

export function start() {
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  refresh();
}

/** Poll now. Calls during a poll share its response. */
export function refresh() {
  pending ??= ask().finally(() => {
    pending = null;
    clearTimeout(timer);
    // Do not prompt for a key every second after the user declined.
    if (state.problem?.status !== 401) timer = setTimeout(() => document.hidden || refresh(), EVERY);
  });
  return pending;
}

/** The time line of an ended request of this page, once the server has it. */
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
    state.samples.length = 0; // the clock of another server
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

/** The engine's work between two responses; null if it restarted in between. */
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
    busy: Math.min(1, passed.busy / seconds / Math.max(1, second.replicas?.length ?? 0)),
    decode, prompt,
  };
}

/** The fraction of prompt tokens found in the prefix cache over these samples; null without prompts. */
function hitsOf(samples) {
  const sum = (name) => samples.reduce((total, sample) => total + sample[name], 0);
  return sum("queried") ? sum("found") / sum("queried") : null;
}

/** The shortest time for work of one kind: limited by bandwidth or by compute. */
export function leastSeconds(work, ceilings) {
  return Math.max(work.bytes / ceilings.read_bytes_per_s, work.flops / (ceilings.flops ?? Infinity));
}
