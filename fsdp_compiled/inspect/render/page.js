// Shows the data-tip of the mark under the pointer beside it.
const tip = document.getElementById("tip");
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
document.addEventListener("scroll", () => { tip.hidden = true; }, true);

function show(event) {
  const mark = event.target instanceof Element && event.target.closest("[data-tip]");
  tip.hidden = !mark;
  if (!mark) return;
  if (tip.textContent !== mark.dataset.tip) tip.textContent = mark.dataset.tip;
  const { width, height } = tip.getBoundingClientRect();
  const below = event.clientY + 16;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 12, innerWidth - width - 8))}px`;
  tip.style.top = `${below + height > innerHeight ? Math.max(8, event.clientY - height - 12) : below}px`;
}
