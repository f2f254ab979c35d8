// Numbers as people read them; an en dash where there is none.

export const NONE = "–";

export function count(value) {
  if (value === null || value === undefined) return NONE;
  return Math.round(value).toLocaleString("en-US");
}

export function short(value) {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) >= 999_500) return `${(value / 1e6).toFixed(1)}M`;
  if (Math.abs(value) >= 9_950) return `${(value / 1e3).toFixed(0)}k`;
  if (Math.abs(value) >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(1);
}

/** Seconds, in the unit that needs few digits. */
export function span(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return NONE;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.000_995) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (size < 0.0995) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (size < 0.995) return `${(seconds * 1e3).toFixed(0)} ms`;
  if (size < 99.5) return `${seconds.toFixed(size < 9.95 ? 2 : 1)} s`;
  return size < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Two spans as a figure and what stands small beside it; a unit that both have is said once. */
export function pair(one, other) {
  const [first, second] = [span(one), span(other)];
  const [value, unit] = first.split(" ");
  return unit && second.endsWith(` ${unit}`) ? [value, `/ ${second}`] : [first, `/ ${second}`];
}

export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return NONE;
  return `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const gib = value / 2 ** 30;
  return gib >= 1 ? `${gib.toFixed(1)} GiB` : `${(value / 2 ** 20).toFixed(0)} MiB`;
}

/** The telling part of a request's id: of a job the end, for all begin with the time or their batch. */
export function shortId(id) {
  const bare = id.replace(/^(chatcmpl|cmpl|resp|msg|embd|pool|classify|score|rerank)[-_]/, "");
  if (bare.startsWith("job-")) return `job-…${bare.slice(-7)}`;
  return bare.length > 12 ? bare.slice(0, 12) : bare;
}

/** How long ago something was, to a second. */
export function age(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return whole < 100 ? `${whole} s` : span(whole);
}
