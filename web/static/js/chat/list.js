// The chats that are kept, in a dialog: open one, or delete it (which can be undone as long as the dialog is open).

import { fill, h } from "../dom.js";
import { chats, remove, store, titleOf } from "./chats.js";

export function showChats(talk) {
  talk.save();
  const list = h("ul", { class: "chats" });
  const dialog = h("dialog", { class: "snippet", "aria-labelledby": "chats-title", onclose: () => dialog.remove() });
  const all = chats();
  fill(list, all.map((chat) => row(chat)), !all.length && h("li", { class: "quiet" }, "None yet. Whatever you ask is kept here, in this browser only."));
  dialog.append(h("form", { method: "dialog" }, h("h2", { id: "chats-title" }, "Chats"), list,
    h("div", { class: "actions" }, h("button", { class: "button" }, "Close"))));
  document.body.append(dialog);
  dialog.showModal();

  function row(chat) {
    const item = h("li", {});
    const isOpen = chat.id === talk.state.id;
    const show = () => fill(item,
      h("button", { class: "chat", type: "button", "aria-current": isOpen ? "true" : null, onclick: () => { dialog.close(); if (!isOpen) talk.open(chat); } },
        h("span", { class: "clip" }, titleOf(chat)), h("span", { class: "small faint num" }, when(chat.savedMs))),
      h("button", { class: "button small ghost danger", type: "button", "aria-label": `Delete ${titleOf(chat)}`, onclick: () => {
        if (isOpen) talk.drop();
        remove(chat.id);
        fill(item, h("span", { class: "quiet clip" }, "Deleted."), h("button", { class: "button small", type: "button", onclick: () => { store(chat); show(); } }, "Undo"));
      } }, "Delete"));
    show();
    return item;
  }
}

function when(ms) {
  const date = new Date(ms), today = date.toDateString() === new Date().toDateString();
  return today ? date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }) : date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}
