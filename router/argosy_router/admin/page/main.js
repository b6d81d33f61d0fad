// The page's life: which view is shown, and the next look at the router.

import { json } from "./api.js";
import { $, age, element, setClass, setText } from "./dom.js";
import * as fleet from "./fleet.js";
import * as playground from "./playground.js";

const PERIOD_MS = 1000;
const RETRY_MS = 3000;
const SHOWN_DECISIONS = 200;
const SHOWN_REFUSALS = 100;
const views = ["fleet", "playground"];
const picker = $("model");

function showView() {
  const wanted = location.hash.slice(1);
  const view = views.includes(wanted) ? wanted : "fleet";
  for (const panel of document.querySelectorAll("[data-panel]")) panel.hidden = panel.dataset.panel !== view;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view === "playground") playground.focus();
}

function showHead(overview) {
  setText($("router-name"), overview.router);
  setText($("state"), { ready: "Ready", starting: "Starting", draining: "Draining" }[overview.state]);
  setClass($("state-dot"), `dot ${overview.state === "ready" ? "good" : "warn"}`);
  setText($("uptime"), `up ${age(overview.uptime_s)}`);
  $("uptime").title = `version ${overview.version}, ${overview.connections} client connections`;
}

/** Services by key; one model name may be served in several namespaces. */
function showModels(services) {
  const keys = services.map((service) => service.service);
  const shown = [...picker.options].map((option) => option.value);
  if (keys.join("\n") !== shown.join("\n")) {
    const chosen = picker.value;
    picker.replaceChildren(...services.map((service) => {
      const option = element("option", "", service.model);
      option.value = service.service;
      option.title = service.service;
      return option;
    }));
    if (keys.includes(chosen)) picker.value = chosen;
  }
  picker.disabled = services.length < 2;
  return services.find((service) => service.service === picker.value);
}

async function look() {
  const overview = await json("overview");
  showHead(overview);
  const service = showModels(overview.services);
  fleet.showServices(overview.services, service?.service, (key) => {
    picker.value = key;
    turn();
  });
  playground.show(service);
  const path = `decisions?limit=${SHOWN_DECISIONS}&model=${encodeURIComponent(service?.model ?? "")}`;
  const refused = `refusals?limit=${SHOWN_REFUSALS}`;
  const [latest, refusals] = fleet.isPaused() ? [null, null] : await Promise.all([json(path), json(refused)]);
  fleet.show(service, latest, refusals);
}

let timer = 0;

async function turn() {
  clearTimeout(timer);
  let pause = PERIOD_MS;
  try {
    await look();
  } catch (error) {
    pause = RETRY_MS;
    setText($("state"), error instanceof TypeError ? "Not reachable" : error.message);
    setClass($("state-dot"), "dot bad");
  }
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(turn, pause);
}

window.addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", () => !document.hidden && turn());
picker.addEventListener("change", turn);
showView();
turn();
