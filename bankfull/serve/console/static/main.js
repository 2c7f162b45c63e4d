// Navigation by URL hash, colour theme, and the server's status line.

import { askForKey } from "./api.js";
import { batchesPage } from "./batches.js";
import { chatPage } from "./chat.js";
import { find } from "./dom.js";
import { count } from "./format.js";
import { livePage } from "./live.js";
import { memoryPage } from "./memory.js";
import { requestsPage } from "./requests.js";
import { listen, refresh, start, state } from "./state.js";

const PAGES = ["chat", "live", "requests", "memory", "batches"];
const THEMES = { auto: "system setting", light: "light", dark: "dark" };

chatPage();
const redraw = { live: livePage(), requests: requestsPage(), memory: memoryPage() };
const batches = batchesPage();
let current = null;

function turnTo(name, focus) {
  const wanted = PAGES.includes(name) ? name : "chat";
  if (current === wanted) return;
  if (current === "batches") batches.leave();
  current = wanted;
  for (const page of PAGES) {
    find(`#${page}`).hidden = page !== wanted;
    const link = find(`nav a[href="#${page}"]`);
    if (page === wanted) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${wanted[0].toUpperCase()}${wanted.slice(1)} · bankfull`;
  if (wanted === "batches") batches.enter();
  redraw[wanted]?.(state);
  if (wanted === "chat" && focus) find("#question").focus();
}

function showStatus() {
  const { now, problem } = state;
  const kind = problem ? "bad" : !now ? "" : now.ready ? "good" : "wait";
  let text = "the engine is loading";
  if (problem) text = problem.message;
  else if (now.ready) text = now.load?.running ? `${now.model} · ${count(now.load.running)} running` : now.model;
  find("#status").dataset.kind = kind;
  if (find("#status-text").textContent !== text) find("#status-text").textContent = text;
}

// A browser may forbid storage; the choice then lasts until the page is closed.
function keep(theme) {
  try {
    localStorage.setItem("bankfull.theme", theme);
  } catch {}
}

function kept() {
  try {
    return localStorage.getItem("bankfull.theme");
  } catch {
    return null;
  }
}

function setTheme(name) {
  const chosen = name in THEMES ? name : "auto";
  document.documentElement.dataset.theme = chosen;
  const button = find("#theme");
  button.textContent = chosen[0].toUpperCase() + chosen.slice(1);
  button.setAttribute("aria-label", `Colours: ${THEMES[chosen]}`);
  keep(chosen);
}

find("#theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
});
find("#key").addEventListener("click", async () => {
  if (await askForKey("Enter another API key.")) refresh();
});
window.addEventListener("hashchange", () => {
  if (location.hash === "#main") return find("#main").focus();
  turnTo(location.hash.slice(1), true);
});
window.addEventListener("resize", () => redraw[current]?.(state));

setTheme(kept());
turnTo(location.hash.slice(1), true);
listen(() => {
  showStatus();
  redraw[current]?.(state);
});
start();
