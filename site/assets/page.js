// The search index is as large as several pages: it is fetched when the search field is first used, not with each page.
(() => {
  "use strict";
  const { send } = XMLHttpRequest.prototype;
  const { open } = XMLHttpRequest.prototype;
  const waiting = [];
  let used = new URLSearchParams(location.search).has("q");
  XMLHttpRequest.prototype.open = function (method, url, ...rest) {
    this.isIndex = String(url).endsWith("search/search_index.json");
    return open.call(this, method, url, ...rest);
  };
  XMLHttpRequest.prototype.send = function (...body) {
    if (this.isIndex && !used) waiting.push(() => send.apply(this, body));
    else send.apply(this, body);
  };
  const use = (event) => {
    if (used || !event.target.closest?.(".md-search, [for=__search], #__search")) return;
    used = true;
    for (const go of waiting) go();
  };
  for (const kind of ["focusin", "click", "change"]) document.addEventListener(kind, use);
})();

// What the theme leaves out for a phone, a keyboard and a screen reader.
(() => {
  "use strict";
  const phone = matchMedia("(max-width: 37.99em)");
  const FEW_ROWS = 8;

  // A row of sentences, or one of few, is read by itself: its cells flow below its name, each behind its header.
  const stacks = (table) => table.querySelector(".prose") || table.tBodies[0]?.rows.length <= FEW_ROWS;
  const label = (table) => {
    const headers = [...(table.tHead?.rows[0]?.cells ?? [])].map((cell) => cell.textContent.trim());
    for (const row of table.tBodies[0].rows) for (const cell of row.cells) cell.dataset.label = headers[cell.cellIndex] ?? "";
  };

  const reach = () => {
    // A landmark a code block is none to find one's way by.
    for (const bar of document.querySelectorAll("nav.md-code__nav:not([role])")) bar.setAttribute("role", "none");
    const boxes = [...document.querySelectorAll(".md-typeset__scrollwrap:not(#flashlab-explorer *)")];
    const wide = (box) => box.scrollWidth > box.clientWidth;
    for (const box of boxes) box.querySelector("table")?.removeAttribute("data-stacked");
    const narrow = phone.matches ? boxes.filter(wide).map((box) => box.querySelector("table")).filter(stacks) : [];
    for (const table of narrow) {
      label(table);
      table.setAttribute("data-stacked", "");
    }
    for (const box of boxes) {
      const scrolls = wide(box);
      if (scrolls === box.hasAttribute("tabindex")) continue;
      for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", "Table, scrolls sideways"]]) {
        if (scrolls) box.setAttribute(name, value);
        else box.removeAttribute(name);
      }
    }
  };
  addEventListener("load", () => {
    document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
    reach();
    new MutationObserver(reach).observe(document.querySelector("article") ?? document.body, { childList: true, subtree: true });
  });
  addEventListener("resize", reach);
  document.addEventListener("toggle", reach, true);
})();
