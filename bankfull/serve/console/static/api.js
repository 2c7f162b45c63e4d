// All calls to the server. The API key is kept in this tab's session storage and sent as a header, only to this origin.

import { find } from "./dom.js";

const KEPT = "bankfull.key";
let asking = null;

export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEPT);
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

/** The response to a successful call; prompts for an API key if the server requires one. */
export async function call(path, options = {}) {
  for (;;) {
    const used = sessionStorage.getItem(KEPT);
    let answer;
    try {
      answer = await fetch(path, {
        ...options, headers: headers(options.headers), credentials: "omit", redirect: "error",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The server cannot be reached.", 0);
    }
    if (answer.ok) return answer;
    const problem = await problemOf(answer.status, await answer.text());
    if (answer.status !== 401) throw problem;
    if (!(await askForKey(problem.message, used))) throw problem;
  }
}

export async function json(path, options = {}) {
  return (await call(path, options)).json();
}

export function post(path, body, options = {}) {
  return call(path, {
    ...options, method: "POST", body: JSON.stringify(body),
    headers: { ...options.headers, "content-type": "application/json" },
  });
}

function problemOf(status, text) {
  try {
    return new Problem(JSON.parse(text).error.message, status);
  } catch {
    return new Problem(`The server refused the call with status ${status}.`, status);
  }
}

/** True if there is a key other than the refused `used` one. Prompts once for any number of refused calls. */
export function askForKey(why, used = sessionStorage.getItem(KEPT)) {
  const now = sessionStorage.getItem(KEPT);
  if (now && now !== used) return Promise.resolve(true);
  asking ??= showDialog(why).finally(() => (asking = null));
  return asking;
}

function showDialog(why) {
  const dialog = find("#key-dialog"), text = find("#key-text");
  find("#key").hidden = false;
  find("#key-why").textContent = `${why} The key is stored in this tab only, until you close it.`;
  text.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  text.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = text.value.trim();
      text.value = "";
      if (dialog.returnValue === "use" && key) {
        sessionStorage.setItem(KEPT, key);
        return resolve(true);
      }
      resolve(false);
    }, { once: true });
  });
}

/** The JSON documents of a stream of server-sent events. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data: "));
      const data = lines.map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

/** Upload a file for batches; `progress` receives the fraction sent. fetch cannot report that. */
export async function upload(file, progress) {
  await call("/v1/models"); // prompts for a key before a large upload
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file);
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", "/v1/files");
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => progress(event.total ? event.loaded / event.total : 0));
    request.addEventListener("error", () => reject(new Problem("The upload was interrupted; try again.", 0)));
    request.addEventListener("load", () => {
      if (request.status < 400) return resolve(JSON.parse(request.responseText));
      reject(problemOf(request.status, request.responseText));
    });
    request.send(form);
  });
}
