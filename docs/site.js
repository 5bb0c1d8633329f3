// Tables and code that scroll sideways can be reached by the Tab key in every browser, and so scrolled without a mouse.
addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, pre > code"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
});
