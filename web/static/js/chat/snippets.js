// A request as something to run elsewhere: curl, Python, a job on Redis.

import { fill, h, segmented } from "../dom.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curl(origin, body, needsKey) {
  return [`curl -N ${origin}/v1/chat/completions \\`, "  -H 'Content-Type: application/json' \\",
    ...(needsKey ? ['  -H "Authorization: Bearer $PAGEBUS_API_KEY" \\'] : []), `  -d ${quoted(JSON.stringify(body, null, 2))}`].join("\n");
}

const KNOWN = new Set(["model", "messages", "stream", "stream_options", "temperature", "top_p", "n", "seed", "stop", "max_tokens",
  "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format", "tools", "timeout"]);

export function python(origin, body, needsKey) {
  const known = Object.entries(body).filter(([name]) => KNOWN.has(name) && name !== "stream_options");
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.has(name)));
  const lines = known.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, 1)},`);
  const key = needsKey ? 'os.environ["PAGEBUS_API_KEY"]' : '"none"';
  const use = body.stream ? ["for chunk in answer:", "    if chunk.choices:", '        print(chunk.choices[0].delta.content or "", end="", flush=True)']
    : ["for choice in answer.choices:", "    print(choice.message.content)"];
  return [...(needsKey ? ["import os", ""] : []), "from openai import OpenAI", "", `client = OpenAI(base_url="${origin}/v1", api_key=${key})`,
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

export function redisJob(deployment, body) {
  const { stream, stream_options: _, ...rest } = body;
  const line = { custom_id: "mine-1", method: "POST", url: "/v1/chat/completions", body: rest };
  return `redis-cli XADD ${quoted(`{${deployment}}:jobs`)} '*' request ${quoted(JSON.stringify(line))}\n\n` +
    `# the answer:\nredis-cli XREAD BLOCK 0 STREAMS ${quoted(`{${deployment}}:results`)} 0`;
}

/** A dialog with the three. */
export function showSnippets({ body, deployment, needsKey }) {
  const origin = location.origin;
  const texts = { curl: curl(origin, body, needsKey), Python: python(origin, body, needsKey), "Redis job": redisJob(deployment, body) };
  const code = h("pre", { tabindex: "0" });
  const copy = h("button", { class: "button primary", type: "button", onclick: async () => {
    await navigator.clipboard.writeText(code.textContent);
    copy.textContent = "Copied";
  } }, "Copy");
  const show = (name) => { fill(code, texts[name]); copy.textContent = "Copy"; };
  const dialog = h("dialog", { class: "snippet", "aria-labelledby": "snippet-title", onclose: () => dialog.remove() },
    h("form", { method: "dialog" }, h("h2", { id: "snippet-title" }, "The same request from elsewhere"),
      segmented("As", Object.keys(texts).map((name) => [name, name]), "curl", show), code,
      h("div", { class: "actions" }, h("button", { class: "button" }, "Close"), copy)));
  show("curl");
  document.body.append(dialog);
  dialog.showModal();
}
