// Histograms of all trajectories; dragging over one keeps a range.

const histograms = {};

function counted(values) {
  const finite = values.filter((value) => value !== null);
  const [low, high] = minmax(finite);
  const whole = finite.every(Number.isInteger);
  let width = (high - low) / BINS || 1;
  if (whole) width = Math.max(1, Math.ceil(width));
  const bins = Math.max(1, Math.floor((high - low) / width) + 1);
  const counts = new Array(bins).fill(0);
  for (const value of finite) counts[Math.min(bins - 1, Math.floor((value - low) / width))] += 1;
  return { low, width, counts, middles: counts.map((_, i) => low + (whole ? i * width : (i + 0.5) * width)), finite: finite.length, whole };
}

function minmax(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function histogram(name) {
  const place = byId(`histogram-${name}`);
  place.replaceChildren();
  const found = counted(rows[name]);
  if (!found.finite) return void place.append(element("p", { className: "gone", text: "nothing of it is on record" }));
  const style = getComputedStyle(document.documentElement);
  const [ink, line, bar] = ["--soft", "--line", "--cold"].map((variable) => style.getPropertyValue(variable));
  const axis = { stroke: ink, font: "11px system-ui", grid: { stroke: line, width: 1 }, ticks: { show: false } };
  const half = found.width / 2;
  histograms[name] = new uPlot(
    {
      width: place.clientWidth, height: 92, legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false, range: [found.middles[0] - half, found.middles.at(-1) + half] }, y: { range: (u, low, high) => [0, high * 1.05] } },
      axes: [{ ...axis, grid: { show: false }, size: 20, gap: 2 }, { ...axis, size: 40, gap: 3, space: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }],
      series: [{}, { fill: `rgba(${bar}, .55)`, stroke: `rgb(${bar})`, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.92, 60] }) }],
      hooks: { setSelect: [(u) => u.select.width > 2 && select(name, u, found)] },
    },
    [found.middles, found.counts],
    place,
  );
}

function select(name, plot, found) {
  const at = (pixel) => plot.posToVal(pixel, "x");
  const [from, to] = [at(plot.select.left), at(plot.select.left + plot.select.width)];
  if (found.whole) return range(name, Math.ceil(from), Math.floor(to));
  const digits = Math.max(0, 2 - Math.floor(Math.log10(found.width * BINS)));
  range(name, Number(from.toFixed(digits)), Number(to.toFixed(digits)));
}
