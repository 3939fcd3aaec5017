// One latent beside its nearest one in the other SAE, on the same text.
function positions(columns, name, w) {
  const found = new Map();
  for (let i = columns[`${name}Firings`][w]; i < columns[`${name}Firings`][w + 1]; i++) found.set(columns[`${name}Position`][i], columns[`${name}Value`][i]);
  return found;
}

async function sideBySide(latent, columns, row, windows) {
  const width = columns.other.length / (columns.windows.length - 1), match = columns.other[row * width];
  if (!(match >= 0)) return null;
  const fired = book.columns.fired[latent], there = columns.otherFired[row * width], both = columns.both[row];
  const mine = windows.filter(window => window.band === TOP).map(window => ({...window, also: positions(columns, "pair", window.number)}));
  const its = [];
  for (let w = columns.there[row]; w < columns.there[row + 1]; w++) {
    its.push({context: columns.thereContext[w], center: columns.thereCenter[w], values: positions(columns, "there", w), also: positions(columns, "here", w)});
  }
  await Promise.all(its.map(async window => { window.words = await contextTokens(window.context); }));
  const most = Math.max(...its.map(window => window.values.get(window.center)));
  const overlap = `Both fire at ${whole(both)} tokens: ${percent(both, fired)} of this latent's ${whole(fired)} and ${percent(both, there)} of the other's ${whole(there)}.`;
  const side = (title, list, maximum) => make("div", {}, make("h4", {}, title), list.length ? contextList(list, maximum) : make("p", {class: "note"}, "It does not fire in this text."));
  return section(`Side by side with ${book.about.other} #${match}`, `${overlap} Top contexts of each; dotted underlines mark where the other one fires too.`,
    make("div", {class: "pair beside"}, side("This latent", mine, book.columns.maximum[latent]), side(`${book.about.other} #${match}`, its, most)));
}

const percent = (some, all) => all ? `${Math.round((100 * some) / all)}%` : "0%";
