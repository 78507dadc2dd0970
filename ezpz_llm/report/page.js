"use strict";
// Adds switches to each chart, and a cursor, moved by pointer or arrow keys, that shows the value of every series at
// its position. The lines are redrawn only when a switch changes.
for (const plot of document.querySelectorAll(".plot")) {
  const figure = plot.closest("figure");
  const scale = text => {
    const [low, high, kind] = text.split(" ");
    const isLog = kind === "log";
    const share = value => isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return { isLog, units: value => 1000 * share(value) };
  };
  const x = scale(plot.dataset.x);
  const first = scale(plot.dataset.y);
  let y = first;
  const series = [...plot.querySelectorAll("path[data-name]")].map(path => {
    // A gap has no value.
    const points = path.dataset.points.split(",").map(pair => pair.split(" ").map(word => word ? +word : NaN));
    return { path, name: path.dataset.name, isDots: path.classList.contains("dots"), points, shown: points };
  });

  const places = [...new Set(series.flatMap(one => one.points.map(point => point[0])))].sort((a, b) => a - b);
  const output = figure.querySelector("output");
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  let at = places.length - 1;
  const digits = value => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
  const distance = (one, other) => Math.abs(x.units(one) - x.units(other));
  const nearest = (points, place) => points.reduce((a, b) => distance(b[0], place) < distance(a[0], place) ? b : a);
  const show = index => {
    at = Math.max(0, Math.min(places.length - 1, index));
    const place = places[at];
    plot.append(cursor);
    cursor.style.left = `${x.units(place) / 10}%`;
    const values = series.map(one => {
      const [px, value] = nearest(one.shown.filter(point => !isNaN(point[1])), place);
      return distance(px, place) > 20 ? null : `${one.name} ${digits(value)}`;
    });
    output.textContent = `${plot.dataset.label} ${digits(place)}: ${values.filter(Boolean).join(", ")}`;
  };
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    const pointed = (event.clientX - box.left) / box.width * 1000;
    const off = place => Math.abs(x.units(place) - pointed);
    show(places.indexOf(places.reduce((a, b) => off(b) < off(a) ? b : a)));
  });
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", "Values: left and right arrow keys");
  plot.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    if (by) { show(at + by); event.preventDefault(); }
  });
  plot.addEventListener("focus", () => show(at));

  // Exponential moving average with bias correction, as in Adam.
  const decay = 0.9;
  const smoothed = points => {
    let sum = 0, weight = 0;
    return points.map(([place, value]) => {
      if (isNaN(value)) return [place, value];
      sum = decay * sum + (1 - decay) * value;
      weight = decay * weight + (1 - decay);
      return [place, sum / weight];
    });
  };
  const line = (points, isDots) => {
    let isDown = false;
    return points.map(([place, value]) => {
      const known = !isNaN(value) && !(y.isLog && value <= 0);
      const pen = isDown ? "L" : "M";
      isDown = known && !isDots;
      if (!known) return "";
      return `${pen}${x.units(place).toFixed(1)} ${(1000 - y.units(value)).toFixed(2)}${isDots ? "h0" : ""}`;
    }).join("");
  };
  const draw = () => {
    y = scales && scales.checked !== first.isLog ? scale(plot.dataset.second) : first;
    figure.classList.toggle("on-second", y !== first);
    plot.querySelectorAll(".raw").forEach(path => path.remove());
    for (const one of series) {
      const isSmooth = Boolean(average && average.checked) && !one.isDots;
      one.shown = isSmooth ? smoothed(one.points) : one.points;
      one.path.setAttribute("d", line(one.shown, one.isDots));
      if (!isSmooth) continue;
      const raw = one.path.cloneNode();
      raw.classList.add("raw");
      raw.setAttribute("d", line(one.points, false));
      one.path.before(raw);
    }
  };

  const csv = () => {
    const quoted = text => /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    const rows = [["series", plot.dataset.label, plot.dataset.unit].map(quoted)];
    for (const one of series) {
      for (const [place, value] of one.points) if (!isNaN(value)) rows.push([quoted(one.name), place, value]);
    }
    return rows.map(row => `${row.join(",")}\n`).join("");
  };
  const download = () => {
    const title = figure.querySelector("figcaption").textContent;
    const link = document.createElement("a");
    link.download = `${title.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60).replace(/-$/, "")}.csv`;
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  };

  const switches = document.createElement("div");
  switches.className = "switches";
  const checkbox = (text, isChecked) => {
    const label = document.createElement("label");
    const input = document.createElement("input");
    input.type = "checkbox";
    input.checked = isChecked;
    input.addEventListener("change", draw);
    label.append(input, text);
    switches.append(label);
    return input;
  };
  // No average over a logarithmic x axis (sizes), where it is meaningless, or for unconnected dots.
  const hasAverage = !x.isLog && series.some(one => !one.isDots);
  const average = hasAverage && checkbox("moving average of about 10 points", false);
  const scales = plot.dataset.second && checkbox("logarithmic axis", first.isLog);
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Points as CSV";
  button.addEventListener("click", download);
  switches.append(button);
  figure.querySelector(".key").after(switches);
}
