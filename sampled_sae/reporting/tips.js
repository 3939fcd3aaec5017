// The meaning of a number, on hover, focus and tap: elements with data-tip, and one box that shows it.
const tip = document.createElement("div");
tip.className = "tip";
tip.id = "tip";
tip.role = "tooltip";
tip.hidden = true;
let tipped = null;

function showTip(node) {
  if (node === tipped) return;
  tipped?.removeAttribute("aria-describedby");
  tipped = node;
  tip.hidden = !node;
  if (!node) return;
  tip.textContent = node.dataset.tip;
  document.body.append(tip);
  node.setAttribute("aria-describedby", "tip");
  const at = node.getBoundingClientRect(), box = tip.getBoundingClientRect(), room = document.documentElement.clientWidth - box.width - 8;
  const above = at.top - box.height - 6;
  tip.style.left = `${Math.max(8, Math.min(at.left, room))}px`;
  tip.style.top = `${above > 8 ? above : at.bottom + 6}px`;
}

const tipOf = event => event.target instanceof Element ? event.target.closest("[data-tip]") : null;
document.addEventListener("mouseover", event => showTip(tipOf(event)));
document.addEventListener("focusin", event => showTip(tipOf(event)));
document.addEventListener("focusout", () => showTip(null));
document.addEventListener("click", event => showTip(tipOf(event)));  // a tap
document.addEventListener("scroll", () => showTip(null), true);
document.addEventListener("keydown", event => { if (event.key === "Escape") showTip(null); });
