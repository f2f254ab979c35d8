// Answers that are JSON: shown with indents.

/** Whether an answer was asked to be JSON. */
export function structured(body) {
  return ["json_schema", "json_object"].includes(body.response_format?.type) || Boolean(body.structured_outputs?.json);
}

/** The text with indents if it is JSON, and was meant to be or is an object or an array; null else. */
export function jsonOf(text, body) {
  if (!structured(body) && !/^\s*[[{][\s\S]*[\]}]\s*$/.test(text)) return null;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}
