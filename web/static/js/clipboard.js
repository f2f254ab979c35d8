// Copying, also where a page has no clipboard: over plain HTTP from another machine browsers give it none.

/** Copy a text that is shown in `element`, or elsewhere if that is null. False: it could not be copied; it is selected. */
export async function copy(text, element = null) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text, element);
  }
}

function copySelected(text, element) {
  const shown = element ?? document.body.appendChild(Object.assign(document.createElement("pre"), { className: "sr", textContent: text }));
  const range = document.createRange();
  range.selectNodeContents(shown);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  const copied = document.execCommand("copy");
  if (!element) {
    getSelection().removeAllRanges();
    shown.remove();
  }
  return copied;
}

/** A button's text tells what has come of it, for a moment. */
export async function copyBy(button, text, element = null) {
  const before = button.textContent;
  const copied = await copy(text, element);
  button.textContent = copied ? "Copied" : element ? "Press Ctrl+C" : "Cannot copy here";
  setTimeout(() => { button.textContent = before; }, 2000);
}
