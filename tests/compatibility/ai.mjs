// What the Vercel AI SDK gets from a server: node ai.mjs BASE_URL. Ends with an error if anything is wrong.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "pagebus", baseURL: process.argv[2], includeUsage: true, supportsStructuredOutputs: true,
});
const ask = { model: provider("pagebus"), prompt: "What is a dog?", temperature: 0, maxRetries: 0 };
const short = { ...ask, maxOutputTokens: 12 }, long = { ...ask, maxOutputTokens: 100 };

const answer = await generateText(short);
assert.ok(answer.text);
assert.equal(answer.finishReason, "length");
assert.equal(answer.usage.outputTokens, 12);

const stream = streamText(short);
let streamed = "";
for await (const part of stream.textStream) streamed += part;
assert.equal(streamed, answer.text);
assert.equal((await stream.usage).outputTokens, 12);

const completed = await generateText({ ...short, model: provider.completionModel("pagebus"), prompt: "A dog is" });
assert.equal(completed.usage.outputTokens, 12);

const schema = z.object({ mood: z.enum(["good", "bad"]), stars: z.number().int().min(1).max(5) });
schema.parse((await generateObject({ ...long, schema })).object);
let last;
for await (last of streamObject({ ...long, schema }).partialObjectStream);
schema.parse(last);

const tools = { rate: tool({ description: "Rate a film.", inputSchema: schema }) };
for (const toolChoice of ["required", { type: "tool", toolName: "rate" }]) {
  const [call] = (await generateText({ ...long, maxOutputTokens: 200, tools, toolChoice })).toolCalls;
  assert.equal(call.toolName, "rate");
  schema.parse(call.input);
}
const calling = streamText({ ...long, maxOutputTokens: 200, tools, toolChoice: "required" });
await calling.consumeStream();
schema.parse((await calling.toolCalls)[0].input);

const { embedding } = await embed({ maxRetries: 0, model: provider.textEmbeddingModel("pagebus"), value: "a dog" });
assert.ok(embedding.length > 0);

await assert.rejects(generateText({ ...short, temperature: 9 }), (error) => {
  assert.ok(APICallError.isInstance(error));
  assert.equal(error.statusCode, 400);
  assert.match(error.message, /temperature/);
  return true;
});
const { version } = JSON.parse(readFileSync(new URL("node_modules/ai/package.json", import.meta.url)));
console.log(`ai (Vercel AI SDK) ${version} | generateText, streamText, usage, completions, generateObject, streamObject, tools, embed, errors`);
