"use strict";
// A cursor in each chart, moved by pointer or arrow keys, that says the values of every series beside it.
// The points are read back from the drawn paths, so that the page holds them once.
for (const plot of document.querySelectorAll(".plot")) {
  const scales = {};
  for (const axis of ["x", "y"]) {
    const [low, high, kind] = plot.dataset[axis].split(" ");
    scales[axis] = share => kind === "log" ? low * (high / low) ** share : +low + (high - low) * share;
  }
  const series = [...plot.querySelectorAll("path[data-name]")].map(path => ({
    name: path.dataset.name,
    points: path.getAttribute("d").match(/[\d.-]+ [\d.-]+/g).map(pair => pair.split(" ").map(Number)),
  }));
  const places = [...new Set(series.flatMap(one => one.points.map(point => point[0])))].sort((a, b) => a - b);
  const output = plot.closest("figure").querySelector("output");
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  let at = places.length - 1;

  const digits = value => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  const show = index => {
    at = Math.max(0, Math.min(places.length - 1, index));
    const x = places[at];
    plot.append(cursor);
    cursor.style.left = `${x / 10}%`;
    const values = series.map(one => {
      const [px, py] = nearest(one.points, x);
      return Math.abs(px - x) > 20 ? null : `${one.name} ${digits(scales.y(1 - py / 1000))}`;
    });
    output.textContent = `${plot.dataset.label} ${digits(scales.x(x / 1000))}: ${values.filter(Boolean).join(", ")}`;
  };
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * 1000;
    show(places.indexOf(places.reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a)));
  });
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", "Values: left and right arrow keys");
  plot.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    if (by) { show(at + by); event.preventDefault(); }
  });
  plot.addEventListener("focus", () => show(at));
}
