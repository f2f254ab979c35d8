// Runs before the first paint, so that nobody sees the wrong colours flash.
(() => {
  const wanted = localStorage.getItem("pagebus.theme");
  const dark = wanted ? wanted === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
