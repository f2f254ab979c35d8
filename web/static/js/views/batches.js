// Batches: upload a file of requests, watch it run, take the answers.

import { getJson, request } from "../api.js";
import { fill, h } from "../dom.js";
import { count, NONE } from "../format.js";

const LOOK_MS = 1000;
const OVER = new Set(["completed", "failed", "expired", "cancelled"]);

export function batchesView({ world, view, signal }) {
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const list = h("div", { class: "view" });
  const input = h("input", { type: "file", class: "sr", id: "batch-file", accept: ".jsonl,.json", onchange: () => upload(input.files[0]) });
  const drop = h("section", { class: "drop card", ondragover: (event) => { event.preventDefault(); drop.classList.add("over"); },
    ondragleave: () => drop.classList.remove("over"), ondrop: (event) => {
      event.preventDefault();
      drop.classList.remove("over");
      upload(event.dataTransfer.files[0]);
    } },
  h("h2", {}, "Run many requests when there is room"),
  h("p", { class: "quiet" }, "A file with one request per line, as OpenAI's batches have it. They stand behind all interactive requests."),
  input, h("label", { class: "button primary", for: "batch-file" }, "Choose a file"),
  h("button", { class: "button ghost", type: "button", onclick: () => upload(new File([example()], "example.jsonl")) }, "Run an example of 20 questions"),
  h("pre", { tabindex: "0", "aria-label": "A line of such a file" }, example().split("\n")[0]));
  const none = h("section", { class: "card empty" }, h("h2", {}, "No batches here"),
    h("p", {}, "This server keeps no files: it was started without --files-dir. Queued work can still be pushed onto the stream of jobs by any Redis client."));
  view.append(problem);
  let timer = null;
  const begin = () => {
    if (timer || !world.hello.model) return;
    timer = setInterval(() => world.hello.takes_batches && look(), LOOK_MS);
    view.append(...(world.hello.takes_batches ? [drop, list] : [none]));
    if (world.hello.takes_batches) look();
  };
  world.on("status", begin, signal);
  begin();

  const fail = (error) => {
    if (signal.aborted) return;
    problem.hidden = false;
    problem.textContent = error.message;
  };

  async function upload(file) {
    if (!file) return;
    problem.hidden = true;
    try {
      const form = new FormData();
      form.append("purpose", "batch");
      form.append("file", file, file.name);
      const { id } = await getJson("/v1/files", { method: "POST", body: form });
      const endpoint = JSON.parse((await file.text()).split("\n")[0]).url;
      await request("/v1/batches", { json: { input_file_id: id, endpoint, completion_window: "24h", metadata: { name: file.name.slice(0, 200) } } });
      await look();
    } catch (error) {
      fail(error);
    }
    input.value = "";
  }

  async function look() {
    try {
      const { data } = await getJson("/v1/batches?limit=20", { signal });
      fill(list, data.map((batch) => card(batch, look, fail)));
      return data.some((batch) => !OVER.has(batch.status));
    } catch (error) {
      fail(error);
      return false;
    }
  }

  signal.addEventListener("abort", () => clearInterval(timer));
}

function card(batch, look, fail) {
  const { total = 0, completed = 0, failed = 0 } = batch.request_counts ?? {};
  const part = (value, kind) => h("i", { class: kind, style: { width: `${(100 * value) / Math.max(1, total)}%` } });
  const cancel = async () => {
    try {
      await request(`/v1/batches/${encodeURIComponent(batch.id)}/cancel`, { method: "POST" });
      await look();
    } catch (error) {
      fail(error);
    }
  };
  const kind = { completed: "good", failed: "bad", expired: "bad", cancelled: "warn" }[batch.status] ?? "";
  return h("section", { class: "card batch", "aria-label": batch.id },
    h("header", {}, h("h2", { class: "clip" }, batch.metadata?.name ?? batch.id), h("span", { class: `chip ${kind}` }, batch.status),
      batch.output_file_id && h("button", { class: "button small", type: "button", onclick: () => save(batch.output_file_id).catch(fail) }, "Answers"),
      batch.error_file_id && h("button", { class: "button small", type: "button", onclick: () => save(batch.error_file_id).catch(fail) }, "Errors"),
      !OVER.has(batch.status) && h("button", { class: "button small danger", type: "button", onclick: cancel }, "Cancel")),
    h("div", { class: "progress", role: "progressbar", "aria-label": "Requests done", "aria-valuemin": "0", "aria-valuemax": String(total), "aria-valuenow": String(completed + failed) },
      part(completed, ""), part(failed, "bad")),
    h("p", { class: "small quiet num" }, total ? `${count(completed)} of ${count(total)} done${failed ? `, ${count(failed)} failed` : ""}` : NONE));
}

/** Hand a file of the server to the user. */
async function save(id) {
  const blob = await (await request(`/v1/files/${encodeURIComponent(id)}/content`)).blob();
  const link = h("a", { href: URL.createObjectURL(blob), download: `${id}.jsonl` });
  link.click();
  URL.revokeObjectURL(link.href);
}

function example() {
  const words = ["water", "river", "brave", "light", "house", "music", "bread", "ocean", "stone", "green", "happy", "winter", "honest", "bridge",
    "garden", "silver", "thunder", "gentle", "planet", "letter"];
  return words.map((word, index) => JSON.stringify({ custom_id: `word-${index + 1}`, method: "POST", url: "/v1/chat/completions",
    body: { messages: [{ role: "user", content: `What is ${word}?` }], max_tokens: 60 } })).join("\n");
}
