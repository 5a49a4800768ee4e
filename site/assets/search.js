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
