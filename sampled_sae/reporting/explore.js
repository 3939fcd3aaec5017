// The figure of any two metrics; `draw` and `recolor` are those of the page.

function frontOf(points, x, y, metrics) {
  const good = (point, axis) => point.values[axis][0] * (metrics[axis].better === "high" ? 1 : -1);
  const beats = (a, b) => good(a, x) >= good(b, x) && good(a, y) >= good(b, y) &&
                          (good(a, x) > good(b, x) || good(a, y) > good(b, y));
  return points.filter(point => !points.some(other => beats(other, point)))
               .sort((a, b) => a.values[x][0] - b.values[x][0] || a.values[y][0] - b.values[y][0]);
}

function bars(points, axis, color) {
  const stats = points.map(point => point.values[axis]);
  if (!stats.some(([, low, high]) => low < high)) return undefined;
  return {type: "data", symmetric: false, thickness: 1, width: 0, color,
          array: stats.map(([mean, , high]) => high - mean), arrayminus: stats.map(([mean, low]) => mean - low)};
}

function traces(content, points, front, x, y) {
  const line = {x: front.map(p => p.values[x][0]), y: front.map(p => p.values[y][0]), mode: "lines", hoverinfo: "skip",
                line: {color: content.front, width: 1.5, shape: content.metrics[x].better === "low" ? "hv" : "vh"}};
  const groups = content.groups.map(group => {
    const own = points.filter(point => point.group === group.name);
    return {
      type: "scatter", mode: "markers", name: group.title, x: own.map(p => p.values[x][0]), y: own.map(p => p.values[y][0]),
      // What is on the front stands out.
      marker: {...group.marker, opacity: own.map(p => !front.length || front.includes(p) ? 1 : 0.5)},
      hovertext: own.map(p => [p.about, p.texts[x], p.texts[y]].join("<br>")), hovertemplate: "%{hovertext}<extra></extra>",
      error_x: bars(own, x, content.bars), error_y: bars(own, y, content.bars),
    };
  });
  return [line, ...groups];
}

function said(points, front, x, y, metrics) {
  if (!points.length) return "No SAE has both metrics.";
  const endless = [x, y].filter(axis => metrics[axis].better === null).map(axis => metrics[axis].title);
  if (endless.length) return `There is no Pareto front: neither high nor low ${endless.join(" and ")} is better.`;
  if (x === y) return "There is no Pareto front of a metric with itself.";
  const names = front.map(point => point.label);
  const shown = names.length > 12 ? [...names.slice(0, 12), `${names.length - 12} more`] : names;
  return `On the Pareto front, from left to right: ${shown.join(", ")}.`;
}

function explorer(box) {
  const content = JSON.parse(box.querySelector("script").textContent), {metrics} = content;
  const [xBox, yBox] = box.querySelectorAll("select"), each = box.querySelector("[data-each]");
  return () => {
    if (box.closest("[hidden]")) return;
    const x = xBox.value, y = yBox.value;
    const points = (each?.checked ? content.saes : content.rows).filter(point => x in point.values && y in point.values);
    const ranked = metrics[x].better && metrics[y].better && x !== y;
    const front = ranked ? frontOf(points, x, y, metrics) : [];
    const layout = structuredClone(content.layout);
    layout.xaxis.title.text = metrics[x].axis;
    layout.yaxis.title.text = metrics[y].axis;
    layout.uirevision = `${x} ${y}`;  // a new pair begins unzoomed
    drawInto(box.dataset.explorer, traces(content, points, front, x, y), layout);
    box.querySelector("[data-front]").textContent = said(points, front, x, y, metrics);
    const meanings = [...new Set([x, y])].map(axis => [metrics[axis].title, metrics[axis].meaning]);
    box.querySelector("[data-meanings]").replaceChildren(...meanings.flatMap(([title, meaning]) => {
      const term = document.createElement("dt"), text = document.createElement("dd");
      term.textContent = title;
      text.textContent = meaning;
      return [term, text];
    }));
  };
}

for (const box of document.querySelectorAll("[data-explorer]")) {
  const show = explorer(box);
  box.querySelectorAll("select, input").forEach(control => control.onchange = show);
  drawers.push(show);
}
