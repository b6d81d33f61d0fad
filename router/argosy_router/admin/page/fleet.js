// Tiles, replicas and decisions of one service.

import { $, Table, age, count, element, rate, seconds, setClass, setText, share, short } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 100;
const HEIGHT = 30;

// tiles

/** {name, unit?, figure: of Figures, text, note: of (service) } */
const TILES = [
  {
    name: "Requests",
    unit: "/s",
    figure: (f) => f.requests_per_s,
    text: rate,
    note: ({ trend }) => failures(trend.recent.failed_ratio),
    isBad: ({ trend }) => trend.recent.failed_ratio > 0,
  },
  {
    name: "Served from cache",
    figure: (f) => f.hit_ratio,
    text: share,
    top: 1,
    note: (service) => `${short(service.index_chunks)} chunks indexed`,
  },
  {
    name: "Time to first token",
    figure: (f) => f.ttft_p50_s,
    text: seconds,
    note: ({ trend }) => `p90 ${seconds(trend.recent.ttft_p90_s)}`,
  },
  {
    name: "Output tokens",
    unit: "/s",
    figure: (f) => f.output_tokens_per_s,
    text: rate,
    note: ({ replicas }) => `${total(replicas, "requests")} running or waiting`,
  },
  {
    name: "Prompt tokens queued",
    live: (service) => service.replicas.reduce((sum, replica) => sum + replica.queued_tokens, 0),
    text: short,
    note: ({ replicas }) => `${total(replicas, "inflight")} in flight here`,
  },
];

function failures(ratio) {
  if (ratio == null) return "none in the last minute";
  return ratio ? `${share(ratio)} failed` : "none failed";
}

const total = (replicas, field) => count(replicas.reduce((sum, replica) => sum + replica[field], 0));

class Tile {
  constructor(description) {
    this.description = description;
    this.node = element("div", "tile");
    this.value = element("div", "value");
    this.figure = element("span");
    this.value.append(this.figure);
    if (description.unit) this.value.append(element("small", "", description.unit));
    this.note = element("div", "note");
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("aria-hidden", "true");
    [this.area, this.curve] = ["area", "curve"].map((name) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      this.svg.append(path);
      return path;
    });
    this.history = [];
    this.node.append(element("div", "name", description.name), this.value, this.note, this.svg);
  }

  show(service) {
    const { figure, live, text, note, isBad, top } = this.description;
    setText(this.figure, text(live ? live(service) : figure(service.trend.recent)));
    setText(this.note, note(service));
    setClass(this.note, isBad?.(service) ? "note bad-text" : "note");
    if (live) {
      if (this.of !== service.service) this.history = [];
      this.of = service.service;
      this.history = [...this.history.slice(-59), live(service)];
    }
    this.#draw(live ? this.history : service.trend.curve.map(figure), top);
  }

  /** Gaps in the data are drawn at the last value known. */
  #draw(values, top) {
    const highest = top ?? (Math.max(...values.filter((value) => value != null), 0) || 1);
    const step = WIDTH / Math.max(1, values.length - 1);
    let last = 0;
    const points = values.map((value, position) => {
      last = value ?? last;
      return `${(position * step).toFixed(2)} ${(HEIGHT - 2 - (last / highest) * (HEIGHT - 6)).toFixed(2)}`;
    });
    const line = points.length > 1 && values.some(Boolean) ? `M${points.join("L")}` : "";
    this.curve.setAttribute("d", line);
    this.area.setAttribute("d", line && `${line}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z`);
  }
}

const tiles = TILES.map((description) => new Tile(description));
$("tiles").append(...tiles.map((tile) => tile.node));

// all services

const serviceTable = new Table($("services"), [
  {
    name: "Service",
    make(cell) {
      cell.link = element("button", "link");
      cell.link.type = "button";
      cell.append(cell.link);
    },
    show(cell, s) {
      setText(cell.link, s.service);
      cell.link.onclick = () => choose(s.service);
    },
  },
  { name: "Model", make: makeClip, show: (cell, s) => showClip(cell, s.model, [s.model, ...s.aliases].join(", ")) },
  {
    name: "Replicas",
    title: "that may get requests, of all",
    kind: "number",
    make() {},
    show(cell, { replicas }) {
      const routable = replicas.filter((r) => r.is_available).length;
      setText(cell, `${routable} / ${replicas.length}`);
      setClass(cell, routable < replicas.length ? "number warn-text" : "number");
    },
  },
  { name: "Requests/s", kind: "number", show: (_, { trend }) => rate(trend.recent.requests_per_s) },
  {
    name: "Failed",
    kind: "number",
    make() {},
    show(cell, { trend }) {
      setText(cell, share(trend.recent.failed_ratio));
      setClass(cell, trend.recent.failed_ratio > 0 ? "number bad-text" : "number");
    },
  },
  { name: "First token", title: "median of the last minute", kind: "number", show: (_, { trend }) => seconds(trend.recent.ttft_p50_s) },
  { name: "From cache", kind: "number", show: (_, { trend }) => share(trend.recent.hit_ratio) },
  { name: "Output tok/s", kind: "number", show: (_, { trend }) => rate(trend.recent.output_tokens_per_s) },
  { name: "Queued tokens", kind: "number", show: (_, { replicas }) => count(replicas.reduce((sum, r) => sum + r.queued_tokens, 0)) },
]);

let choose = () => {};

/** `onChoose` gets the key of a service whose name is pressed. */
export function showServices(services, chosen, onChoose) {
  choose = onChoose;
  $("services").closest("section").hidden = services.length < 2;
  serviceTable.show(services, (s) => s.service, (s) => (s.service === chosen ? "chosen" : ""));
  setText($("services-note"), `${services.length} services`);
}

// replicas

const STATES = {
  synced: ["good", "its cache and load are known as they change"],
  stale: ["warn", "its telemetry is lost; routed by what it was sent"],
  foreign: ["good", "another engine; routed by what it was sent"],
  connecting: ["idle", "nobody answers there; gets no requests"],
  suspect: ["warn", "silent, or its engine core has not turned for a while; used when nothing better is there"],
  ejected: ["bad", "its last requests failed; tried again soon"],
  "half-open": ["warn", "its last requests failed; the next one decides"],
  draining: ["idle", "gets no new requests"],
};

function makeGauge(cell) {
  const gauge = element("span", "gauge");
  const track = element("i");
  cell.bar = element("b");
  cell.figure = element("span");
  track.append(cell.bar);
  gauge.append(track, cell.figure);
  cell.append(gauge);
}

function showGauge(cell, ratio, text) {
  const width = `${Math.round(Math.min(1, Math.max(0, ratio)) * 100)}%`;
  if (cell.bar.style.width !== width) cell.bar.style.width = width;
  setClass(cell.bar, ratio >= 0.9 ? "warn" : "");
  setText(cell.figure, text);
}

const replicaTable = new Table($("replicas"), [
  { name: "Replica", make: makeClip, show: (cell, r) => showClip(cell, r.name, r.url) },
  {
    name: "State",
    make(cell) {
      cell.dot = element("i", "dot");
      cell.word = element("span");
      cell.append(cell.dot, cell.word);
    },
    show(cell, r) {
      const [colour, meaning] = STATES[r.state];
      setClass(cell.dot, `dot ${colour}`);
      setText(cell.word, r.state);
      cell.title = r.heard_s == null ? meaning : `${meaning}; heard ${age(r.heard_s)} ago`;
    },
  },
  {
    name: "Requests",
    title: "running or waiting, of what it runs at once",
    make: makeGauge,
    show: (cell, r) => showGauge(cell, r.requests / r.max_num_seqs, `${r.requests} / ${r.max_num_seqs}`),
  },
  {
    name: "KV cache",
    title: "share taken by running requests",
    make: makeGauge,
    show: (cell, r) => showGauge(cell, r.kv_usage, share(r.kv_usage)),
  },
  { name: "Queued tokens", title: "prompt tokens ahead of a new request", kind: "number", show: (_, r) => count(r.queued_tokens) },
  { name: "Hit rate", title: "prompt tokens from its cache, since this router started", kind: "number", show: (_, r) => share(r.hit_ratio) },
  { name: "Prefill tok/s", title: "measured; – until it is", kind: "number", show: (_, r) => short(r.prefill_tokens_per_s) },
  { name: "Decode step", title: "measured; – until it is", kind: "number", show: (_, r) => seconds(r.decode_step_s) },
  { name: "In flight", title: "requests of this router", kind: "number", show: (_, r) => count(r.inflight) },
]);

function makeClip(cell) {
  cell.text = element("span", "clip");
  cell.append(cell.text);
}

function showClip(cell, text, title = text) {
  setText(cell.text, text);
  if (cell.title !== title) cell.title = title;
}

// decisions

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const SEVERE = 500;
const ID_LENGTH = 14;

/** Ids of one process differ at their ends. */
const ending = (id) => (id.length > ID_LENGTH ? `…${id.slice(1 - ID_LENGTH)}` : id);

const statusColumn = {
  name: "Status",
  kind: "number",
  make() {},
  show(cell, row) {
    setText(cell, row.status ? String(row.status) : "…");
    setClass(cell, row.status >= SEVERE ? "number bad-text" : row.status >= 400 ? "number warn-text" : "number");
  },
};

/** The code of an error, or its type if it has none, and the field of the request that it is about. */
const errorColumn = {
  name: "Error",
  title: "code or type; field of the request",
  make: makeClip,
  show: (cell, row) => showClip(cell, [row.error_code || row.error_type, row.error_param].filter(Boolean).join(", ")),
};

const decisionTable = new Table($("decisions"), [
  { name: "Time", kind: "number", show: (_, d) => clock.format(d.time * 1000) },
  { name: "Request", kind: "mono", make: makeClip, show: (cell, d) => showClip(cell, ending(d.request_id), d.request_id) },
  { name: "Replica", make: makeClip, show: (cell, d) => showClip(cell, d.attempt > 1 ? `${d.replica} (attempt ${d.attempt})` : d.replica) },
  {
    name: "Reason",
    make(cell) {
      cell.tag = element("span");
      cell.append(cell.tag);
    },
    show(cell, d) {
      setClass(cell.tag, `tag ${d.reason}`);
      setText(cell.tag, d.reason);
    },
  },
  { name: "Prompt", title: "tokens; estimated until the answer tells", kind: "number", show: (_, d) => count(d.prompt_tokens) },
  { name: "Hit expected", kind: "number", show: (_, d) => count(d.predicted_cached_tokens) },
  { name: "Hit", title: "as the answer told", kind: "number", show: (_, d) => count(d.cached_tokens) },
  { name: "First token expected", title: "once the replica's speed is measured", kind: "number", show: (_, d) => seconds(d.predicted_ttft_s) },
  { name: "First token", title: "of streams", kind: "number", show: (_, d) => seconds(d.ttft_s) },
  { name: "Output", title: "tokens", kind: "number", show: (_, d) => count(d.completion_tokens) },
  statusColumn,
  errorColumn,
]);

const refusalTable = new Table($("refusals"), [
  { name: "Time", kind: "number", show: (_, r) => clock.format(r.time * 1000) },
  { name: "Request", kind: "mono", make: makeClip, show: (cell, r) => showClip(cell, ending(r.request_id), r.request_id) },
  { name: "Model", make: makeClip, show: (cell, r) => showClip(cell, r.model || "–") },
  statusColumn,
  errorColumn,
]);

const pause = $("pause");
const reason = $("reason");
let decisions = [];

pause.addEventListener("click", () => {
  const isPressed = pause.getAttribute("aria-pressed") !== "true";
  pause.setAttribute("aria-pressed", String(isPressed));
  setText(pause, isPressed ? "Resume" : "Pause");
});
reason.addEventListener("change", () => showDecisions());

export const isPaused = () => pause.getAttribute("aria-pressed") === "true";

/** How far the fetch of the service's model is, after `start`; nothing is said of a model that every replica has. */
const fetched = ({ model_fetch: state, model_source: source }, start = ", model ") =>
  state && state !== "cached" ? `${start}${state} (${source})` : "";

/** `service` is undefined where the router has none; `latest` and `refusals` are null while paused. */
export function show(service, latest, refusals) {
  $("tiles").hidden = !service;
  if (service) for (const tile of tiles) tile.show(service);
  const replicas = service?.replicas ?? [];
  replicaTable.show(replicas, (r) => r.name);
  const routable = replicas.filter((r) => r.is_available).length;
  setText($("replicas-note"), service ? `${replicas.length ? `${routable} of ${replicas.length} routable, ` : ""}policy ${service.policy}${fetched(service)}` : "");
  $("replicas-empty").hidden = replicas.length > 0;
  setText($("replicas-empty"), service
    ? `No replica yet. Requests are answered with 503 until one is ready.${fetched(service, " Model: ")}`
    : "The router knows no service yet: create an InferenceService, or name engines with --replica.");
  if (latest) decisions = latest;
  showDecisions();
  if (refusals) {
    refusalTable.show(refusals, (r) => `${r.request_id} ${r.time}`);
    $("refusals-empty").hidden = refusals.length > 0;
    $("refusals").parentElement.hidden = refusals.length === 0;
  }
}

function showDecisions() {
  const shown = decisions.filter((d) => !reason.value || d.reason === reason.value);
  decisionTable.show(shown, (d) => `${d.request_id} ${d.time}`);
  $("decisions-empty").hidden = decisions.length > 0;
  $("decisions").parentElement.hidden = decisions.length === 0;
  setText($("decisions-note"), decisions.length ? `${shown.length} of the last ${decisions.length}` : "");
}
