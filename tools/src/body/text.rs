//! Formats a body as one line of text.

use std::fmt;

use serde_json::Value;

use super::Body;

/// `NAME field=value field={field=value}`, and the error, if any.
impl fmt::Display for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.procedure)?;
        match &self.value {
            Value::Object(fields) if fields.is_empty() => {}
            Value::Object(_) => {
                f.write_str(" ")?;
                write_fields(f, &self.value)?;
            }
            value => {
                f.write_str(" ")?;
                write_value(f, value)?;
            }
        }
        let kind = if self.is_malformed { "error bad_body: " } else { "" };
        self.error.as_ref().map_or(Ok(()), |error| write!(f, " {kind}{error}"))
    }
}

fn write_fields(f: &mut fmt::Formatter<'_>, value: &Value) -> fmt::Result {
    for (index, (name, value)) in value.as_object().into_iter().flatten().enumerate() {
        write!(f, "{}{name}=", if index == 0 { "" } else { " " })?;
        write_value(f, value)?;
    }
    Ok(())
}

fn write_value(f: &mut fmt::Formatter<'_>, value: &Value) -> fmt::Result {
    match value {
        Value::Null => f.write_str("none"),
        Value::Object(_) => {
            f.write_str("{")?;
            write_fields(f, value)?;
            f.write_str("}")
        }
        Value::Array(elements) => {
            f.write_str("[")?;
            for (index, element) in elements.iter().enumerate() {
                f.write_str(if index == 0 { "" } else { " " })?;
                write_value(f, element)?;
            }
            f.write_str("]")
        }
        // A text is quoted unless it consists of characters that have no meaning in this format.
        Value::String(text) if !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "_-./:".contains(c)) => {
            f.write_str(text)
        }
        // The JSON form escapes line breaks and quotes.
        value => write!(f, "{value}"),
    }
}
