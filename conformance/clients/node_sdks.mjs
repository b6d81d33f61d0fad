// The SDKs of OpenAI and Anthropic for Node: what each method gives an application, as one JSON object.
//
//     node node_sdks.mjs BASE_URL        ARGOSY_NODE_MODULES names the folder in which npm has installed them
import { createRequire } from "node:module";

const require = createRequire(process.env.ARGOSY_NODE_MODULES + "/");
const { OpenAI } = require("openai");
const { Anthropic } = require("@anthropic-ai/sdk");

const baseURL = process.argv[2];
const openai = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });

const asked = { model: "tiny", max_tokens: 100, temperature: 0, messages: [{ role: "user", content: "Hello!" }] };
const weather = { ...asked, messages: [{ role: "user", content: "What is the weather in Paris?" }], max_tokens: 300 };
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const about = { name: "get_weather", description: "Get the current weather in a city." };
const mood = {
  type: "object",
  properties: { mood: { enum: ["good", "bad"] }, level: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["mood", "level"],
  additionalProperties: false,
};
const endless = { ...asked, max_tokens: 3000, ignore_eos: true, stream: true };

/** The text of a message, without the thinking before it. */
const textOf = (content) => content.filter((block) => block.type === "text").map((block) => block.text).join("");

/** What an application sees of a call that the server refuses. */
async function refused(call) {
  try {
    await call();
  } catch (error) {
    const { status, type, param, message } = error;
    return { class: error.constructor.name, status, type, param, message, request: Boolean(error.requestID) };
  }
  return "no error";
}

/** How a stream ends for an application that aborts it at the first event. */
async function aborted(open) {
  const controller = new AbortController();
  let events = 0;
  try {
    for await (const _ of await open({ signal: controller.signal })) {
      if (events++ === 0) controller.abort();
    }
  } catch (error) {
    if (error.constructor.name !== "APIUserAbortError") throw error;
  }
  return { events };
}

const cases = {
  async openai_chat() {
    const { choices, usage } = await openai.chat.completions.create(asked);
    return { text: choices[0].message.content, finish: choices[0].finish_reason, usage };
  },
  async openai_stream() {
    const chunks = await openai.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
    let [text, finish, usage] = ["", null, null];
    for await (const chunk of chunks) {
      text += chunk.choices[0]?.delta.content ?? "";
      finish = chunk.choices[0]?.finish_reason ?? finish;
      usage = chunk.usage ?? usage;
    }
    return { text, finish, usage };
  },
  async openai_tools() {
    const called = [];
    const tool = { ...about, parameters: city, parse: JSON.parse, function: (given) => (called.push(given), "sunny") };
    const runner = openai.chat.completions.runTools({ ...weather, tools: [{ type: "function", function: tool }] });
    return { called, text: await runner.finalContent() };
  },
  async openai_structured() {
    const response_format = { type: "json_schema", json_schema: { name: "mood", schema: mood, strict: true } };
    const { choices } = await openai.chat.completions.create({ ...asked, max_tokens: 400, response_format });
    return JSON.parse(choices[0].message.content);
  },
  openai_error: () => refused(() => openai.chat.completions.create({ ...asked, temperature: 3 })),
  openai_unknown_model: () => refused(() => openai.chat.completions.create({ ...asked, model: "nope" })),
  openai_abort: () => aborted((options) => openai.chat.completions.create(endless, options)),
  async anthropic_chat() {
    const { content, stop_reason, usage } = await anthropic.messages.create(asked);
    return { text: textOf(content), finish: stop_reason, usage };
  },
  async anthropic_stream() {
    const stream = anthropic.messages.stream(asked);
    let text = "";
    stream.on("text", (delta) => (text += delta));
    const { stop_reason, usage } = await stream.finalMessage();
    return { text, finish: stop_reason, usage };
  },
  async anthropic_tools() {
    const { content, stop_reason } = await anthropic.messages.create({ ...weather, tools: [{ ...about, input_schema: city }] });
    const calls = content.filter((block) => block.type === "tool_use");
    return { called: calls.map(({ name, input }) => ({ name, input })), finish: stop_reason };
  },
  async anthropic_structured() {
    const output_config = { format: { type: "json_schema", schema: mood } };
    const { content } = await anthropic.messages.create({ ...asked, max_tokens: 400, output_config });
    return JSON.parse(textOf(content));
  },
  anthropic_error: () => refused(() => anthropic.messages.create({ ...asked, temperature: 3 })),
  anthropic_unknown_model: () => refused(() => anthropic.messages.create({ ...asked, model: "nope" })),
  anthropic_abort: () => aborted((options) => anthropic.messages.create(endless, options)),
};

const results = {};
for (const [name, call] of Object.entries(cases)) {
  try {
    results[name] = await call();
  } catch (error) {
    results[name] = { failed: String(error.stack) };
  }
}
console.log(JSON.stringify(results));
