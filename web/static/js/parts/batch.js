// One batch: how far it is, how fast, why it failed, and the first of its answers.

import { request } from "../api.js";
import { fill, h, say } from "../dom.js";
import { age, count, NONE } from "../format.js";

const OVER = new Set(["completed", "failed", "expired", "cancelled"]);
const WORDS = { validating: "Checking the file", in_progress: "Running", finalizing: "Finishing", completed: "Completed", failed: "Failed",
  expired: "Expired", cancelling: "Cancelling", cancelled: "Cancelled" };
const PREVIEWED = 3, PREVIEW_BYTES = 2 ** 18;

export function isOver(batch) {
  return OVER.has(batch.status);
}

/** What its status says to people, and its colour. */
function outcome({ status, request_counts: { total = 0, failed = 0 } = {} }) {
  if (status === "completed" && failed) return failed === total ? ["All failed", "bad"] : [`Completed, ${count(failed)} failed`, "warn"];
  return [WORDS[status] ?? status, { completed: "good", failed: "bad", expired: "bad", cancelled: "warn" }[status] ?? ""];
}

export class BatchCard {
  /** `look()` brings all batches up to date, `fail(error)` shows what went wrong. */
  constructor({ look, fail }) {
    this.fail = fail;
    this.title = h("h2", { class: "clip" });
    this.chip = h("span", { class: "chip" });
    const act = (text, run, className = "") => h("button", { class: `button small ${className}`, type: "button", hidden: true, onclick: () => run().catch(fail) }, text);
    this.preview = act("Preview", () => this.#togglePreview());
    this.answers = act("Answers", () => save(this.batch.output_file_id));
    this.errors = act("Errors", () => save(this.batch.error_file_id));
    this.cancel = act("Cancel", async () => {
      await request(`/v1/batches/${encodeURIComponent(this.batch.id)}/cancel`, { method: "POST" });
      await look();
    }, "danger");
    this.done = h("i", {});
    this.bad = h("i", { class: "bad" });
    this.bar = h("div", { class: "progress", role: "progressbar", "aria-label": "Requests done", "aria-valuemin": "0" }, this.done, this.bad);
    this.facts = h("p", { class: "small quiet num" });
    this.reason = h("p", { class: "error", hidden: true });
    this.shown = h("div", { class: "previews", hidden: true });
    this.element = h("section", { class: "card batch" }, h("header", {}, this.title, this.chip, this.preview, this.answers, this.errors, this.cancel),
      this.bar, this.facts, this.reason, this.shown);
  }

  update(batch) {
    this.batch = batch;
    const { total = 0, completed = 0, failed = 0 } = batch.request_counts ?? {};
    this.element.setAttribute("aria-label", batch.id);
    say(this.title, batch.metadata?.name ?? batch.id);
    const [text, kind] = outcome(batch);
    say(this.chip, text);
    this.chip.className = `chip ${kind}`;
    this.answers.hidden = !batch.output_file_id;
    this.preview.hidden = !batch.output_file_id;
    this.errors.hidden = !batch.error_file_id;
    this.cancel.hidden = isOver(batch) || batch.status === "cancelling";
    const part = (element, value) => element.style.setProperty("width", `${(100 * value) / Math.max(1, total)}%`);
    part(this.done, completed);
    part(this.bad, failed);
    this.bar.setAttribute("aria-valuemax", String(total));
    this.bar.setAttribute("aria-valuenow", String(completed + failed));
    say(this.facts, facts(batch, total, completed, failed));
    this.#explain();
  }

  /** Why it failed: the file as a whole, or the first of its requests that did. */
  #explain() {
    const { errors, error_file_id: file, status } = this.batch;
    const found = (errors?.data ?? []).map(({ line, message }) => `${line ? `Line ${line}: ` : ""}${message}`);
    if (found.length) this.#say(found.slice(0, 3).join(" ") + (found.length > 3 ? ` And ${count(found.length - 3)} more.` : ""));
    else if (file && isOver(this.batch) && this.explained !== file) {
      this.explained = file;
      firstLines(file, 1).then(([line]) => line && this.#say(`${line.custom_id}: ${messageOf(line)}`)).catch(this.fail);
    } else if (status === "expired") this.#say("It was not done within 24 hours.");
  }

  #say(text) {
    this.reason.hidden = false;
    say(this.reason, text);
  }

  async #togglePreview() {
    this.shown.hidden = !this.shown.hidden;
    say(this.preview, this.shown.hidden ? "Preview" : "Close the preview");
    if (this.shown.hidden) return;
    const lines = await firstLines(this.batch.output_file_id, PREVIEWED);
    fill(this.shown, lines.map((line) => h("div", {}, h("h3", {}, line.custom_id), h("p", { class: "small" }, answerOf(line)))));
  }
}

function facts(batch, total, completed, failed) {
  if (!total) return batch.status === "validating" ? "Its lines are being checked." : NONE;
  const done = completed + failed, began = batch.in_progress_at ?? batch.created_at;
  const ended = batch.completed_at ?? batch.failed_at ?? batch.expired_at ?? batch.cancelled_at;
  const tookS = Math.max(0, (ended ?? Date.now() / 1000) - began), perS = tookS > 0 ? done / tookS : 0;
  const left = !isOver(batch) && perS > 0 ? `about ${age((total - done) / perS)} left` : null;
  return [`${count(completed)} of ${count(total)} done`, failed && `${count(failed)} failed`, `${isOver(batch) ? "took" : "for"} ${age(Math.max(1, tookS))}`,
    done && perS && `${perS < 10 ? perS.toFixed(1) : count(perS)} requests/s`, left].filter(Boolean).join(" · ");
}

function messageOf({ error, response }) {
  return error?.message ?? response?.body?.error?.message ?? `status ${response?.status_code}`;
}

function answerOf({ response }) {
  const { choices = [], data, output } = response?.body ?? {};
  const text = choices[0]?.message?.content ?? choices[0]?.text;
  return text || JSON.stringify(choices[0]?.message ?? data?.[0] ?? output ?? response?.body ?? null).slice(0, 300);
}

/** The first lines of a file of the server: no more of it is fetched. */
async function firstLines(id, wanted) {
  const response = await request(`/v1/files/${encodeURIComponent(id)}/content`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (text.split("\n").length <= wanted && text.length < PREVIEW_BYTES) {
    const { value, done } = await reader.read();
    if (done) break;
    text += value;
  }
  reader.cancel().catch(() => {});
  return text.split("\n").slice(0, wanted).flatMap((line) => {
    try {
      return [JSON.parse(line)];
    } catch {
      return [];
    }
  });
}

/** Hand a file of the server to the user. */
async function save(id) {
  const blob = await (await request(`/v1/files/${encodeURIComponent(id)}/content`)).blob();
  const link = h("a", { href: URL.createObjectURL(blob), download: `${id}.jsonl` });
  link.click();
  URL.revokeObjectURL(link.href);
}
