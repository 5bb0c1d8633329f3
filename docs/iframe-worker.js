// Browsers start no Worker for a page that is read from a file: there, the search's code runs in a frame.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(address) {
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true, srcdoc: "<p>" });
      this.ready = new Promise((done) => {
        this.frame.onload = () => {
          const { document: inside } = this.frame.contentWindow;
          this.frame.contentWindow.postMessage = (data) => this.onmessage?.({ data: structuredClone(data) });
          inside.body.append(Object.assign(inside.createElement("script"), { src: address, onload: done }));
        };
      });
      document.body.append(this.frame);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.onmessage({ data: structuredClone(data) }));
    }
    terminate() {
      this.frame.remove();
    }
  };
