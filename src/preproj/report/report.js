// What a page can do beyond being read: sort tables, save figures, choose light or dark. Without it nothing is missing.
"use strict";

function button(label, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = label;
  made.addEventListener("click", act);
  return made;
}

// Numbers by their unrounded value, everything else by its text; rows without a number come last either way.
function sort(table, column, ascending) {
  const body = table.tBodies[0];
  const key = (row) => row.cells[column].dataset.value;
  const rows = [...body.rows];
  const numeric = rows.some((row) => key(row) !== undefined);
  rows.sort((a, b) => {
    const [x, y] = numeric ? [Number(key(a)), Number(key(b))] : [a.cells[column].innerText, b.cells[column].innerText];
    if (numeric && (Number.isNaN(x) || Number.isNaN(y))) return Number.isNaN(x) - Number.isNaN(y);
    const order = numeric ? x - y : x.localeCompare(y);
    return ascending ? order : -order;
  });
  body.append(...rows);
}

for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const title = head.textContent;
    head.textContent = "";
    head.append(button(title, () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      sort(table, column, ascending);
    }));
  });
}

for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg");
  const save = button("SVG", () => {
    const link = document.createElement("a");
    const text = new XMLSerializer().serializeToString(svg);
    link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    link.download = `${figure.id}.svg`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
  save.setAttribute("aria-label", `${figure.querySelector(".scroll").getAttribute("aria-label")}: figure as SVG`);
  figure.querySelector(".tools").prepend(save);
}

const dark = () =>
  (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) ===
  "dark";
const theme = button("", () => {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  say();
});
const say = () => (theme.textContent = dark() ? "Light" : "Dark");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", say);
theme.className = "theme";
theme.setAttribute("aria-description", "changes the colours of the page");
say();
document.querySelector(".bar").append(theme);
