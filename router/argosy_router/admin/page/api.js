// Requests to the admin port, with the key of this tab.

const KEY = "argosy-admin-key";
const dialog = document.getElementById("key-dialog");
const field = document.getElementById("key");
const wrong = document.getElementById("key-wrong");
const forget = document.getElementById("forget");
let asking = null;

// `argosy dashboard` prints an address with the key behind the hash, which browsers keep to themselves.
const given = new URLSearchParams(location.hash.slice(1)).get("key");
if (given) {
  sessionStorage.setItem(KEY, given);
  history.replaceState(null, "", location.pathname);
}

export class Refused extends Error {}

/** The response, whatever its status but 401: then the key is asked for and the request repeated. */
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers };
    if (key) headers.authorization = `Bearer ${key}`;
    const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    forget.hidden = !key;
    if (response.status !== 401) return response;
    if (key && key === sessionStorage.getItem(KEY)) sessionStorage.removeItem(KEY);
    await askForKey(key !== null);
  }
}

/** Decoded JSON. Throws Refused with the router's own words. */
export async function json(path, options) {
  const response = await call(path, options);
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(body?.error?.message ?? `the router answered ${response.status}`);
  return body;
}

export function post(body, headers = {}) {
  return { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json", ...headers } };
}

function askForKey(wasWrong) {
  asking ??= new Promise((resolve) => {
    wrong.hidden = !wasWrong;
    field.value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      if (field.value.trim()) sessionStorage.setItem(KEY, field.value.trim());
      field.value = "";
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}

dialog.addEventListener("cancel", (event) => event.preventDefault());
forget.addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
