// Batches: upload, progress, results.

import { call, json, post, upload } from "./api.js";
import { find, make, save } from "./dom.js";
import { count, moment } from "./format.js";

const EVERY = 1500;
const SHOWN_ERRORS = 3;
const ACTIVE = new Set(["validating", "in_progress", "finalizing", "cancelling"]);
let timer = null;
let shown = false;

export function batchesPage() {
  find("#upload").addEventListener("submit", (event) => {
    event.preventDefault();
    begin();
  });
  find("#example").addEventListener("click", example);
  return {
    enter() {
      shown = true;
      list();
    },
    leave() {
      shown = false;
      clearTimeout(timer);
    },
  };
}

function showMessage(text, problem = false) {
  find("#batch-status").textContent = text;
  find("#batch-status").classList.toggle("problem", problem);
}

async function begin() {
  const file = find("#file").files[0], progress = find("#uploaded"), button = find("#start");
  if (!file) return;
  button.disabled = true;
  progress.hidden = false;
  try {
    showMessage(`Uploading ${file.name}.`);
    const stored = await upload(file, (share) => (progress.value = share));
    await post("/v1/batches", {
      input_file_id: stored.id, endpoint: find("#endpoint").value, completion_window: find("#window").value,
      metadata: { file: file.name.slice(0, 500) },
    });
    showMessage(`${file.name} was submitted.`);
    find("#file").value = "";
  } catch (error) {
    showMessage(error.message, true);
  }
  button.disabled = false;
  progress.hidden = true;
  list();
}

async function list() {
  clearTimeout(timer);
  try {
    const batches = (await json("/v1/batches?limit=20")).data;
    show(batches);
    if (shown && batches.some((batch) => ACTIVE.has(batch.status))) timer = setTimeout(list, EVERY);
  } catch (error) {
    showMessage(error.message, true);
    if (shown && error.status !== 401) timer = setTimeout(list, 4 * EVERY);
  }
}

function show(batches) {
  const place = find("#batch-list");
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.at : null;
  place.replaceChildren(...batches.map(card));
  if (focused) find(`[data-at="${CSS.escape(focused)}"]`, place)?.focus(); // a redrawn button is a new element
  find("#no-batches").hidden = batches.length > 0;
}

function card(batch) {
  const { total, completed, failed } = batch.request_counts, done = completed + failed;
  const name = nameOf(batch);
  const kind = ACTIVE.has(batch.status) ? "busy" : batch.status === "completed" ? "ended" : "bad";
  const errors = batch.errors?.data ?? [], status = batch.status.replace("_", " ");
  const buttons = [
    batch.output_file_id && action(batch, "Results", () => download(batch.output_file_id, `${batch.id}_output.jsonl`)),
    batch.error_file_id && action(batch, "Errors", () => download(batch.error_file_id, `${batch.id}_errors.jsonl`)),
    ["validating", "in_progress"].includes(batch.status) && action(batch, "Cancel", () => cancel(batch.id)),
  ];
  const lines = `${count(done)} of ${count(total)} lines${failed ? `, ${count(failed)} failed` : ""}`;
  const tokens = `${count(batch.usage.input_tokens)} input tokens, ${count(batch.usage.output_tokens)} output tokens`;
  return make(
    "li", { class: "card batch", "data-batch": batch.id },
    make("div", { class: "head" }, make("h2", {}, name), make("span", { class: `badge ${kind}` }, status)),
    make("progress", { max: Math.max(1, total), value: done, "aria-label": `Progress of ${name}` }),
    make("p", {}, [lines, tokens, batch.endpoint, moment(batch.created_at)].join(" · ")),
    ...errors.slice(0, SHOWN_ERRORS).map((error) => make("p", { class: "problem" }, problemOf(error))),
    make("div", { class: "buttons" }, ...buttons.filter(Boolean)),
  );
}

function nameOf(batch) {
  return batch.metadata?.file ?? batch.id;
}

function problemOf(error) {
  return error.line ? `Line ${error.line}: ${error.message}` : error.message;
}

function action(batch, text, work) {
  const label = `${text} of ${nameOf(batch)}`;
  return make("button", { type: "button", "aria-label": label, "data-at": `${batch.id} ${text}`, click: work }, text);
}

async function cancel(id) {
  try {
    await call(`/v1/batches/${id}/cancel`, { method: "POST" });
  } catch (error) {
    showMessage(error.message, true);
  }
  list();
}

async function download(id, name) {
  try {
    save(await (await call(`/v1/files/${id}/content`)).blob(), name);
  } catch (error) {
    showMessage(error.message, true);
  }
}

function example() {
  const questions = ["What is a river?", "What is a channel?", "What does bankfull mean?"];
  const endpoint = find("#endpoint").value, model = find("#model").value;
  const body = {
    "/v1/chat/completions": (text) => ({ model, messages: [{ role: "user", content: text }], max_tokens: 32 }),
    "/v1/completions": (text) => ({ model, prompt: text, max_tokens: 32 }),
    "/v1/embeddings": (text) => ({ model, input: text }),
    "/v1/responses": (text) => ({ model, input: text, max_output_tokens: 32 }),
  }[endpoint];
  const lines = questions.map((text, number) =>
    JSON.stringify({ custom_id: `question-${number + 1}`, method: "POST", url: endpoint, body: body(text) }));
  save(new Blob([lines.join("\n") + "\n"]), "example.jsonl");
}
