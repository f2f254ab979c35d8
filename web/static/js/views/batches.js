// Batches: upload a file of requests, watch it run, take the answers.

import { getJson, request } from "../api.js";
import { h } from "../dom.js";
import { BatchCard, isOver } from "../parts/batch.js";

const LOOK_MS = 1000, REST_MS = 5000;

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
  h("h2", {}, "Run a batch in idle capacity"),
  h("p", { class: "quiet" }, "A file with one request per line, as OpenAI's batches have it. They stand behind all interactive requests."),
  input, h("label", { class: "button primary", for: "batch-file" }, "Choose a file"),
  h("button", { class: "button ghost", type: "button", onclick: () => upload(new File([example()], "example.jsonl")) }, "Run an example of 20 questions"),
  h("pre", { tabindex: "0", "aria-label": "A line of such a file" }, example().split("\n")[0]));
  const none = h("section", { class: "card empty" }, h("h2", {}, "No batches here"),
    h("p", {}, "This server keeps no files: it was started without --files-dir. Queued work can still be pushed onto the stream of jobs by any Redis client."));
  view.append(problem);
  const cards = new Map();
  let timer = null, began = false;

  /** Once it is known whether this server takes batches; who may not know tries. */
  const begin = () => {
    if (began || !(world.hello.model || world.access === "forbidden")) return;
    began = true;
    const takes = world.hello.takes_batches ?? true;
    view.append(...(takes ? [drop, list] : [none]));
    if (takes) look();
  };
  for (const change of ["status", "health"]) world.on(change, begin, signal);
  begin();

  let isListLost = false; // whether the problem shown is that of the list, which ends with the next one
  const fail = (error, isList = false) => {
    if (signal.aborted) return;
    isListLost = isList;
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
      const endpoint = endpointOf(await file.slice(0, 2 ** 20).text());
      await request("/v1/batches", { json: { input_file_id: id, endpoint, completion_window: "24h", metadata: { name: file.name.slice(0, 200) } } });
      await look();
    } catch (error) {
      fail(error);
    }
    input.value = "";
  }

  async function look() {
    clearTimeout(timer);
    let pause = REST_MS;
    if (["ok", "forbidden"].includes(world.access)) {
      try {
        const { data } = await getJson("/v1/batches?limit=20", { signal });
        show(data);
        if (isListLost) problem.hidden = true;
        if (data.some((batch) => !isOver(batch))) pause = LOOK_MS;
      } catch (error) {
        fail(error, true);
      }
    }
    clearTimeout(timer);
    if (!signal.aborted) timer = setTimeout(look, pause);
  }

  function show(batches) {
    for (const batch of batches) {
      if (!cards.has(batch.id)) cards.set(batch.id, new BatchCard({ look, fail }));
      cards.get(batch.id).update(batch);
    }
    const elements = batches.map((batch) => cards.get(batch.id).element);
    elements.forEach((element, index) => {
      if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null);
    });
    while (list.children.length > elements.length) list.lastChild.remove();
  }

  signal.addEventListener("abort", () => clearTimeout(timer));
}

/** Where the requests of a file go, by its first line. */
function endpointOf(text) {
  try {
    return JSON.parse(text.split("\n")[0]).url;
  } catch {
    return "/v1/chat/completions"; // the server says what is wrong with the line
  }
}

function example() {
  const words = ["water", "river", "brave", "light", "house", "music", "bread", "ocean", "stone", "green", "happy", "winter", "honest", "bridge",
    "garden", "silver", "thunder", "gentle", "planet", "letter"];
  return words.map((word, index) => JSON.stringify({ custom_id: `word-${index + 1}`, method: "POST", url: "/v1/chat/completions",
    body: { messages: [{ role: "user", content: `What is ${word}?` }], max_tokens: 60 } })).join("\n");
}
