// What OpenAI's client for Node gets from a server: node client.mjs BASE_URL. Ends with an error if anything is wrong.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "pagebus";
const ask = { model, messages: [{ role: "user", content: "What is a dog?" }], max_tokens: 12, temperature: 0 };

const models = (await client.models.list()).data.map((each) => each.id);
assert.ok(models.includes(model));

const chat = await client.chat.completions.create(ask);
const told = chat.choices[0].message.content;
assert.equal(chat.usage.completion_tokens, 12);

let streamed = "", usage = null;
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, told);
assert.equal(usage.completion_tokens, 12);

const helper = client.chat.completions.stream(ask);
assert.equal((await helper.finalChatCompletion()).choices[0].message.content, told);

const text = await client.completions.create({ model, prompt: "A dog is", max_tokens: 4, temperature: 0, logprobs: 1 });
assert.equal(text.choices[0].logprobs.tokens.length, 4);

const schema = {
  type: "object", properties: { stars: { type: "integer", minimum: 1, maximum: 5 } }, required: ["stars"],
  additionalProperties: false,
};
const shaped = await client.chat.completions.create({
  ...ask, max_tokens: 100, response_format: { type: "json_schema", json_schema: { name: "review", schema, strict: true } },
});
assert.ok(Number.isInteger(JSON.parse(shaped.choices[0].message.content).stars));

const called = await client.chat.completions.create({
  ...ask, max_tokens: 100, tools: [{ type: "function", function: { name: "rate", parameters: schema } }], tool_choice: "required",
});
assert.ok(Number.isInteger(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).stars));

const response = await client.responses.create({ model, input: "What is a dog?", max_output_tokens: 12, temperature: 0 });
assert.equal(response.output_text, told);

await assert.rejects(client.chat.completions.create({ ...ask, temperature: 9 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  return true;
});
console.log(`openai (Node) ${VERSION} | chat, stream, usage, the helper for streams, completions, structured output, tools, responses, errors`);
