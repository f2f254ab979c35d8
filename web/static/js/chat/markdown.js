// Markdown of a model as elements: parsed, then sanitised. No scripts, styles, forms, frames, or pictures from elsewhere.

import DOMPurify from "../../vendor/dompurify/purify.es.mjs";
import { marked } from "../../vendor/marked/marked.esm.js";

const ALLOWED = ["a", "p", "br", "hr", "em", "strong", "del", "code", "pre", "blockquote", "ul", "ol", "li", "h1", "h2", "h3", "h4",
  "h5", "h6", "table", "thead", "tbody", "tr", "th", "td", "sup", "sub"];

// Whatever HTML a model writes is shown as the text that it is.
marked.use({ gfm: true, breaks: true, renderer: { html: ({ text }) => escaped(text) } });

function escaped(text) {
  return text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);
}

/** The elements for a text. */
export function markdown(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), {
    ALLOWED_TAGS: ALLOWED, ALLOWED_ATTR: ["href", "align"], ALLOWED_URI_REGEXP: /^https?:/i, RETURN_DOM_FRAGMENT: true,
  });
  for (const link of fragment.querySelectorAll("a")) {
    link.setAttribute("rel", "noopener noreferrer nofollow");
    link.setAttribute("target", "_blank");
  }
  for (const box of fragment.querySelectorAll("pre, table")) box.setAttribute("tabindex", "0");
  return fragment;
}
