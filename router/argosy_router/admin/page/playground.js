// A chat with the chosen model, and the choice behind each answer. Answers are shown as text, never as markup.

import { call, json, post } from "./api.js";
import { $, Table, count, element, seconds, setText } from "./dom.js";

const MEASURABLE_S = 0.05; // below it, tokens that came together say nothing about speed
const MAX_PICTURE_BYTES = 2 << 20;
const MAX_PICTURES_CHARS = 3 << 20; // of a chat, which sends all of them with each message: the router takes 4 MiB
const log = $("log");
const composer = $("composer");
const prompt = $("prompt");
const send = $("send");
const messages = [];
let service;
let running = null;
let picture = null; // a data URL
let choice = 0; // number of the picture last chosen: one that is read later than the next is dropped

export function show(chosen) {
  if (service?.service !== chosen?.service) clear();
  service = chosen;
  $("explain").disabled = !service;
  send.disabled = !service && !running;
}

export const focus = () => prompt.focus();

// the request

const content = (text) => (picture
  ? [{ type: "image_url", image_url: { url: picture } }, ...(text ? [{ type: "text", text }] : [])]
  : text);

function request(text) {
  const system = $("system").value.trim();
  const all = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  if (text || picture) all.push({ role: "user", content: content(text) });
  return {
    model: service.service,
    messages: all,
    temperature: $("temperature").valueAsNumber || 0,
    max_tokens: $("max-tokens").valueAsNumber || 256,
    stream: true,
    stream_options: { include_usage: true },
  };
}

const session = () => ($("session").value.trim() ? { "x-session-id": encodeURIComponent($("session").value.trim()) } : {});

async function explain(body) {
  const explanation = await json("explain", post(body, session()));
  showRoute(explanation);
  return explanation;
}

// the picture

function thumbnail(url) {
  const image = element("img");
  image.src = url;
  image.alt = "Picture that was sent";
  return image;
}

/** `url` is null for none. */
function showPicture(url, note = "") {
  choice += 1;
  picture = url;
  $("picture").hidden = !url;
  if (url) $("thumbnail").src = url;
  else $("thumbnail").removeAttribute("src");
  prompt.required = !url;
  setText($("picture-note"), note);
}

function takePicture(file) {
  if (!file.type.startsWith("image/")) return showPicture(null, "This file is no picture.");
  if (file.size > MAX_PICTURE_BYTES) {
    return showPicture(null, `The picture has ${(file.size / 2 ** 20).toFixed(1)} MiB; at most ${MAX_PICTURE_BYTES >> 20} MiB are sent. Choose a smaller one.`);
  }
  showPicture(null);
  const mine = choice;
  const reader = new FileReader();
  reader.addEventListener("load", () => {
    if (mine !== choice) return;
    const sent = messages.reduce((sum, { content: parts }) => sum + (Array.isArray(parts) ? parts[0].image_url.url.length : 0), 0);
    if (sent + reader.result.length > MAX_PICTURES_CHARS) showPicture(null, "This chat has too many pictures. Start a new chat.");
    else showPicture(reader.result);
  });
  reader.addEventListener("error", () => mine === choice && showPicture(null, "The picture cannot be read."));
  reader.readAsDataURL(file);
}

$("choose-picture").addEventListener("click", () => $("picture-file").click());
$("picture-file").addEventListener("change", ({ target }) => {
  if (target.files[0]) takePicture(target.files[0]);
  target.value = ""; // so that the same file can be chosen again
});
$("remove-picture").addEventListener("click", () => {
  showPicture(null);
  focus();
});
prompt.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find(({ type }) => type.startsWith("image/"));
  if (!file) return;
  event.preventDefault();
  takePicture(file);
});

// the conversation

function bubble(who) {
  const node = element("div", "message");
  const text = element("div", "text");
  const [thought, said] = [element("span", "thought"), element("span", "said")];
  const meta = element("div", "meta");
  text.append(thought, said);
  node.append(element("div", "who", who), text, meta);
  log.append(node);
  log.scrollTop = log.scrollHeight;
  return { node, thought, said, meta };
}

async function converse(text) {
  const body = request(text);
  messages.push({ role: "user", content: content(text) });
  const question = bubble("You");
  question.said.textContent = text;
  if (picture) question.said.append(thumbnail(picture));
  showPicture(null);
  const answer = bubble(service.model);
  answer.node.classList.add("busy");
  const result = { content: "", tokens: 0, began: performance.now(), first: null, usage: null, headers: null };
  running = new AbortController();
  setText(send, "Stop");
  try {
    await explain(body);
    result.began = performance.now();
    await receive(body, result, answer);
  } catch (error) {
    if (error.name !== "AbortError") answer.meta.append(element("span", "bad-text", error.message));
  } finally {
    running = null;
    setText(send, "Send");
    answer.node.classList.remove("busy");
  }
  if (result.content) messages.push({ role: "assistant", content: result.content });
  else messages.pop();
  showFacts(result);
  summarise(answer, result);
}

async function receive(body, result, answer) {
  const options = { ...post(body, session()), signal: running.signal };
  const response = await call("playground/chat/completions", options);
  result.headers = response.headers;
  if (!response.ok) {
    const refusal = await response.json().catch(() => null);
    throw new Error(refusal?.error?.message ?? `the router answered ${response.status}`);
  }
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) result.usage = chunk.usage;
    const delta = chunk.choices?.[0]?.delta;
    const thought = delta?.reasoning ?? delta?.reasoning_content ?? "";
    const said = delta?.content ?? "";
    if (!thought && !said) continue;
    result.first ??= performance.now();
    result.content += said;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    answer.thought.append(thought);
    answer.said.append(said);
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
}

/** Decoded `data:` events of a stream. */
async function* events(stream) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = stream.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

function summarise(answer, result) {
  if (!result.first) return;
  const elapsed = (performance.now() - result.first) / 1000;
  const tokens = result.usage?.completion_tokens;
  const speed = tokens > 1 && elapsed > MEASURABLE_S ? `, ${((tokens - 1) / elapsed).toFixed(1)} tok/s` : "";
  const place = result.headers.get("x-argosy-replica");
  answer.meta.textContent = `${place}, first token ${seconds((result.first - result.began) / 1000)}${speed}`;
}

function clear() {
  running?.abort();
  messages.length = 0;
  showPicture(null);
  log.replaceChildren();
  showRoute(null);
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = prompt.value.trim();
  if ((!text && !picture) || !service) return;
  prompt.value = "";
  converse(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) composer.requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
send.addEventListener("click", (event) => {
  if (!running) return;
  event.preventDefault(); // an empty message is no reason not to stop
  running.abort();
});
$("clear").addEventListener("click", () => {
  clear();
  focus();
});
$("explain").addEventListener("click", () => {
  const text = prompt.value.trim();
  if (!text && !picture && !messages.length) return focus();
  explain(request(text)).catch((error) => setText($("route-note"), error.message));
});

// the choice

const candidates = new Table($("candidates"), [
  { name: "Replica", show: (_, c) => c.replica },
  { name: "Hit", title: "prompt tokens expected in its cache", kind: "number", show: (_, c) => count(c.hit_tokens) },
  { name: "Known from", show: (_, c) => c.hit_source },
  { name: "Queue", title: "prompt tokens ahead", kind: "number", show: (_, c) => count(c.queued_tokens) },
  { name: "Cost", title: "what the policy compares, above the cheapest", kind: "number", show: (_, c) => seconds(c.above_s) },
]);

let explained = null;

function showRoute(explanation) {
  explained = explanation;
  $("route-empty").hidden = Boolean(explanation);
  $("facts").replaceChildren();
  setText($("route-note"), explanation ? `policy ${explanation.policy}` : "");
  const costs = explanation?.candidates ?? [];
  const least = Math.min(...costs.map((c) => c.cost_s)); // an expected hit makes costs negative: only differences count
  const rows = costs.map((c) => ({ ...c, above_s: c.cost_s - least })).sort((a, b) => a.cost_s - b.cost_s);
  candidates.show(rows, (c) => c.replica, (c) => (c.replica === explanation.replica ? "chosen" : ""));
  for (const [position, row] of rows.entries()) {
    const terms = Object.entries(row.terms).map(([name, value]) => `${name} ${Number(value.toPrecision(3))}`);
    candidates.body.rows[position].title = terms.join("\n");
  }
  if (explanation) showFacts(null);
}

/** `result` is null before there is an answer. */
function showFacts(result) {
  if (!explained) return;
  const usage = result?.usage;
  const went = result?.headers?.get("x-argosy-replica");
  const facts = [
    ["Replica", went ?? explained.replica ?? "none"],
    ["Reason", result?.headers?.get("x-argosy-route") ?? explained.reason],
    ["Prompt", usage ? `${count(usage.prompt_tokens)} tokens` : `about ${count(explained.prompt_tokens)} tokens`],
    ["From cache", `${count(explained.predicted_cached_tokens)} expected${
      usage ? `, ${count(usage.prompt_tokens_details?.cached_tokens ?? 0)} in fact` : ""}`],
    ["First token", `${explained.predicted_ttft_s == null ? "not measured before" : `${seconds(explained.predicted_ttft_s)} expected`}${
      result?.first ? `, ${seconds((result.first - result.began) / 1000)} seen here` : ""}`],
  ];
  $("facts").replaceChildren(...facts.flatMap(([name, text]) => [element("dt", "", name), element("dd", "", text)]));
}
