// Page tables of running sequences, asked for while the page is open.

import { json } from "./api.js";
import { find, make } from "./dom.js";
import { count } from "./format.js";

const SHOWN = 256; // pages of one table

export function memoryPage() {
  let asking = false;
  return async (state) => {
    if (asking || !state.now?.ready) return;
    asking = true;
    try {
      const found = await json("/console/page_tables");
      const shown = Object.entries(found).map(([replica, tables]) => figureOf(replica, tables));
      find("#tables").replaceChildren(...shown);
      find("#no-tables").hidden = Object.values(found).some((tables) => tables.sequences.length > 0);
    } catch {
      // The status line tells of a server that does not answer.
    } finally {
      asking = false;
    }
  };
}

function figureOf(replica, tables) {
  const hidden = tables.running - tables.sequences.length;
  const pool = `${count(tables.held)} pages held, ${count(tables.cached)} cached, ${count(tables.free)} free`;
  return make(
    "figure", { class: "card wide" },
    make("figcaption", {}, replica ? `${replica}: ${pool}` : pool),
    ...tables.sequences.map((sequence) => rowOf(sequence, tables)),
    hidden > 0 ? make("p", { class: "hint" }, `${count(hidden)} more sequences are not shown.`) : null,
  );
}

function rowOf(sequence, tables) {
  const name = `request ${sequence.request}${sequence.sample ? `, sample ${sequence.sample}` : ""}`;
  const who = sequence.key ? `${name} · ${sequence.key}` : name;
  return make(
    "div", { class: "page-row" },
    make("p", {}, who, make("small", {}, `${count(sequence.computed)} tokens`)),
    ...sequence.tables.map((table, group) => pagesOf(table, sequence.computed, tables, group)),
  );
}

function pagesOf(table, computed, tables, group) {
  const size = tables.page_tokens[group];
  const pages = table.slice(0, SHOWN).map((page, index) => {
    const tokens = Math.max(0, Math.min(size, computed - index * size));
    const held = tables.references[page] ?? 1;
    const told = page ? `page ${page}: ${tokens} of ${size} tokens, held ${held} times` : "before the window";
    return make(
      "li", { class: page ? (held > 1 ? "shared" : null) : "gone", title: told, "data-page": page },
      page ? String(page) : "–",
      held > 1 ? make("small", {}, `×${held}`) : null,
    );
  });
  return make("ol", { class: "pages", "aria-label": `Pages of ${size} tokens` }, ...pages);
}
