// One colour per sequence: hues a golden angle apart, so that neighbours in time differ; pixels for canvases.

const GOLDEN = 137.508;
let cache = new Map();
let known = {};

export function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

/** The theme has changed: ask again for everything. */
export function forgetColors() {
  cache = new Map();
  known = {};
}

/** A colour of the style sheet, as `#rrggbb`. */
export function named(name) {
  known[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return known[name];
}

/** OKLCH to sRGB: colours of equal lightness look equally light, whatever their hue. */
function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180), b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s, -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s];
  return linear.map((x) => Math.round(255 * Math.min(1, Math.max(0, x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055))));
}

/** Red, green and blue of a sequence. */
export function rgbOf(id) {
  let rgb = cache.get(id);
  if (!rgb) {
    const number = id & 0xfffff, hue = (number * GOLDEN + 130) % 360;
    rgb = oklch((isDark() ? 0.7 : 0.66) + 0.05 * ((number % 3) - 1), 0.115, hue);
    if (cache.size > 5000) cache.clear();
    cache.set(id, rgb);
  }
  return rgb;
}

export function colourOf(id) {
  return `rgb(${rgbOf(id).join(" ")})`;
}

/** A colour as a pixel of ImageData (little-endian RGBA). */
export function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

export function mix(from, to, share) {
  return from.map((value, index) => Math.round(value + (to[index] - value) * share));
}

export function rgbOfName(name) {
  const hex = named(name).replace("#", "");
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}
