//! Drawings: what several subcommands draw alike.
#![forbid(unsafe_code)]

pub mod heatmap;
pub mod lanes;
pub mod timeline;

/// A web page that shows a drawing.
pub fn page(title: &str, drawing: &str) -> String {
    let title = title.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><title>{title}</title></head>\n\
         <body>\n{drawing}\n</body>\n</html>\n"
    )
}
