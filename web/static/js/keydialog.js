// The API key of this tab: asked for once, and tried before the dialog closes.

import { key, request } from "./api.js";
import { h } from "./dom.js";

let open = false;

/** Ask for a key; `accepted()` once the server has taken one. */
export function askKey(world, accepted) {
  if (open) return;
  open = true;
  const before = key.get();
  const input = h("input", { type: "password", id: "key", autocomplete: "off", value: before, "aria-describedby": "key-refused" });
  const refused = h("p", { class: "error", role: "alert", id: "key-refused", hidden: true });
  const use = h("button", { class: "button primary" }, "Use this key");
  const dialog = h("dialog", { "aria-labelledby": "key-title", onclose: () => { open = false; dialog.remove(); } });
  const submit = async (event) => {
    event.preventDefault();
    use.disabled = true;
    key.set(input.value.trim());
    try {
      await request("/v1/models");
      dialog.close();
      accepted();
    } catch (error) {
      key.set(before);
      refused.hidden = false;
      refused.textContent = error.status === 401 ? "This key was refused." : error.message;
      input.select();
    }
    use.disabled = false;
  };
  dialog.append(h("form", { method: "dialog", onsubmit: submit }, h("h2", { id: "key-title" }, "API key"),
    h("p", { class: "quiet" }, explanation(world, before)), h("label", { class: "field" }, h("span", {}, "Key"), input), refused,
    h("div", { class: "actions" }, h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Cancel"), use)));
  document.body.append(dialog);
  dialog.showModal();
}

function explanation(world, known) {
  if (world.connected && !known) return "This server asks for no key: there is nothing to do. One that you enter is kept in this tab only, and sent along.";
  if (world.access === "forbidden") return "Yours is valid, but no operator's. Another one is kept in this tab only.";
  return "This server was started with keys. Yours is kept in this tab only.";
}
