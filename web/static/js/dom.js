// Elements without markup: whatever is text stays text.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `on*` are listeners, `style` sets custom and other properties, `class`, `data`, and attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name === "class" ? "class" : name, value === true ? "" : value);
  }
  put(element, ...children);
  return element;
}

/** Add children: elements, texts, arrays of these; nothing for null and false. */
export function put(element, ...children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** Replace all children. */
export function fill(element, ...children) {
  element.replaceChildren();
  return put(element, ...children);
}

/** Set the text if it is another one: screens and screen readers are left in peace otherwise. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const PATHS = {
  chat: ["M4 5.5A1.5 1.5 0 0 1 5.5 4h13A1.5 1.5 0 0 1 20 5.5v9a1.5 1.5 0 0 1-1.5 1.5H10l-4.5 4v-4A1.5 1.5 0 0 1 4 14.5z"],
  memory: ["M4 4h6.5v6.5H4z", "M13.5 4H20v6.5h-6.5z", "M4 13.5h6.5V20H4z", "M13.5 13.5H20V20h-6.5z"],
  steps: ["M5 20v-7", "M10 20V8", "M15 20v-5", "M20 20V4"],
  requests: ["M4 6h7", "M8 12h9", "M13 18h7"],
  overview: ["M3.5 18a8.500 8.500 0 1 1 17 0", "M12 18l4-6.500", "M12 6.500v2M6.500 12l1.500 1M17.500 12l.5-.3"],
  charts: ["M4 17l5-6 4 3.5L20 6", "M4 21h16"],
  replay: ["M4 12a8 8 0 1 0 2.6-5.9", "M4 4v4.5h4.5", "M10.5 9v6l4.5-3z"],
  batch: ["M12 4l8 4-8 4-8-4z", "M4 12l8 4 8-4", "M4 16l8 4 8-4"],
  sun: ["M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8z", "M12 2.5v2m0 15v2M2.5 12h2m15 0h2M5.3 5.3l1.4 1.4m10.6 10.6l1.4 1.4m0-13.4l-1.4 1.4M6.7 17.3l-1.4 1.4"],
  key: ["M14.5 13.5a5 5 0 1 0-4-4L3.5 16.500V20h4v-2.500H10v-2.500h2z", "M16 8h.01"],
  help: ["M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18z", "M9.500 9.500a2.500 2.500 0 1 1 3.500 2.300c-.7.3-1 .8-1 1.700", "M12 16.800h.01"],
  send: ["M12 19V5", "M6 11l6-6 6 6"],
  stop: ["M7 7h10v10H7z"],
  tune: ["M4 7h9m5 0h2M4 17h2m5 0h9", "M15.500 9.500a2.500 2.500 0 1 0 0-5 2.500 2.500 0 0 0 0 5z", "M8.500 19.500a2.500 2.500 0 1 0 0-5 2.500 2.500 0 0 0 0 5z"],
  play: ["M8 5.500v13l10.500-6.500z"],
  plus: ["M12 5v14M5 12h14"],
  list: ["M8 6h12M8 12h12M8 18h12", "M4 6h.01M4 12h.01M4 18h.01"],
  pause: ["M9 5.500v13m6-13v13"],
};

/** One of the drawn signs; it says nothing by itself. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  for (const d of PATHS[name]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

/** The text of a button in a view's heading; on a phone only its icon is seen. */
export function labelled(text) {
  return h("span", { class: "label" }, text);
}

/** A row of choices of which one is pressed; calls `choose(value)`. */
export function segmented(label, options, value, choose) {
  const buttons = options.map(([each, text]) =>
    h("button", {
      type: "button",
      "aria-pressed": String(each === value),
      onclick: () => {
        buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(options[index][0] === each)));
        choose(each);
      },
    }, text));
  return h("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
}

/** Say something to those who do not see the screen. */
export function announce(text) {
  say(document.getElementById("announcer"), text);
}
