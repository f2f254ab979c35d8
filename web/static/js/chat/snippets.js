// A request as something to run elsewhere: curl, Python, a job on Redis.

import { SERVER } from "../api.js";
import { copyBy } from "../clipboard.js";
import { fill, h, segmented } from "../dom.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curl(server, body, needsKey) {
  return [`curl -N ${server}/v1/chat/completions \\`, "  -H 'Content-Type: application/json' \\",
    ...(needsKey ? ['  -H "Authorization: Bearer $PAGEBUS_API_KEY" \\'] : []), `  -d ${quoted(JSON.stringify(body, null, 2))}`].join("\n");
}

const KNOWN = new Set(["model", "messages", "stream", "stream_options", "temperature", "top_p", "n", "seed", "stop", "max_tokens",
  "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format", "tools", "timeout"]);

export function python(server, body, needsKey) {
  const known = Object.entries(body).filter(([name]) => KNOWN.has(name) && name !== "stream_options");
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.has(name)));
  const lines = known.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, 1)},`);
  const key = needsKey ? 'os.environ["PAGEBUS_API_KEY"]' : '"none"';
  const use = body.stream ? ["for chunk in answer:", "    if chunk.choices:", '        print(chunk.choices[0].delta.content or "", end="", flush=True)']
    : ["for choice in answer.choices:", "    print(choice.message.content)"];
  return [...(needsKey ? ["import os", ""] : []), "from openai import OpenAI", "", `client = OpenAI(base_url="${server}/v1", api_key=${key})`,
    "answer = client.chat.completions.create(", ...lines, ")", ...use].join("\n");
}

/** A JSON value as Python writes it. */
function literal(value, depth) {
  const pad = "    ".repeat(depth);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const items = Array.isArray(value) ? value.map((each) => literal(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length < 90 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${pad}    ${item},\n`).join("")}${pad}${close}`;
}

/** `redis`: the options by which redis-cli reaches the bus. The newest result is noted first: what comes after it is ours. */
export function redisJob(deployment, redis, body) {
  const { stream, stream_options: _, ...rest } = body;
  const line = { custom_id: "mine-1", method: "POST", url: "/v1/chat/completions", body: rest };
  const cli = ["redis-cli", ...redis.map((each) => (/^[\w./:@-]+$/.test(each) ? each : quoted(each)))].join(" ");
  const [jobs, results] = ["jobs", "results"].map((name) => quoted(`{${deployment}}:${name}`));
  return [`last=$(${cli} --raw XREVRANGE ${results} + - COUNT 1 | head -n 1)`,
    `${cli} XADD ${jobs} '*' request ${quoted(JSON.stringify(line))}`, "", "# the answer:",
    `${cli} --raw XREAD BLOCK 0 COUNT 1 STREAMS ${results} "${"${last:-0}"}"`].join("\n");
}

/** A dialog with all of them; `redis` null: the bus is none, or not known. */
export function showSnippets({ body, deployment, redis, needsKey }) {
  const texts = { curl: curl(SERVER, body, needsKey), Python: python(SERVER, body, needsKey),
    ...(redis ? { "Redis job": redisJob(deployment, redis, body) } : {}) };
  const code = h("pre", { tabindex: "0" });
  const copy = h("button", { class: "button primary", type: "button", onclick: () => copyBy(copy, code.textContent, code) }, "Copy");
  const show = (name) => fill(code, texts[name]);
  const dialog = h("dialog", { class: "snippet", "aria-labelledby": "snippet-title", onclose: () => dialog.remove() },
    h("form", { method: "dialog" }, h("h2", { id: "snippet-title" }, "The same request from elsewhere"),
      segmented("As", Object.keys(texts).map((name) => [name, name]), "curl", show), code,
      h("div", { class: "actions" }, h("button", { class: "button" }, "Close"), copy)));
  show("curl");
  document.body.append(dialog);
  dialog.showModal();
}
