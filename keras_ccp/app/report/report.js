"use strict";

// A press on a head sorts its table: first from the top down, texts from A on.
for (const head of document.querySelectorAll(".sortable thead th")) {
  head.querySelector("button").addEventListener("click", () => {
    const table = head.closest("table");
    const body = table.tBodies[0];
    const isText = head.classList.contains("name");
    const before = head.getAttribute("aria-sort");
    const order = before ? (before === "ascending" ? -1 : 1) : isText ? 1 : -1;
    const value = (row) => {
      const text = row.cells[head.cellIndex].textContent.trim();
      return isText ? text : text === "–" ? -Infinity : Number(text);
    };
    const rows = [...body.rows].map((row) => [value(row), row]);
    rows.sort(([a], [b]) =>
      order * (isText ? a.localeCompare(b, undefined, { numeric: true }) : a === b ? 0 : a < b ? -1 : 1));
    body.append(...rows.map(([, row]) => row));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order > 0 ? "ascending" : "descending");
  });
}

// What a point of a chart stands for, at the pointer or the finger.
const tip = document.getElementById("tip");
document.addEventListener("pointerover", (event) => {
  const text = event.target.closest?.("[data-tip]")?.dataset.tip;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const right = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${scrollX + Math.max(8, Math.min(event.clientX + 12, right))}px`;
  tip.style.top = `${scrollY + event.clientY + 16}px`;
});
