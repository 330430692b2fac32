package dialect

import (
	"fmt"
	"strings"
)

// Literal is a string as PostgreSQL's text of it, in ASCII only, so that neither client_encoding nor
// standard_conforming_strings of a session, which a handler may have changed, alters what it means.
func Literal(s string) string {
	if isPlain(s) {
		return `'` + s + `'`
	}
	var text strings.Builder
	text.WriteString(`E'`)
	for _, r := range s {
		switch {
		case r == '\'':
			text.WriteString(`''`)
		case r == '\\':
			text.WriteString(`\\`)
		case ' ' <= r && r <= '~':
			text.WriteByte(byte(r))
		case r <= 0xffff:
			fmt.Fprintf(&text, `\u%04x`, r)
		default:
			fmt.Fprintf(&text, `\U%08x`, r)
		}
	}
	text.WriteByte('\'')
	return text.String()
}

func isPlain(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '\'' || c == '\\' {
			return false
		}
	}
	return true
}

// Identifier is a name as the SQL text of it, in ASCII only. Names that are not ASCII are found, never given, and
// only in PostgreSQL, which has the escapes.
func Identifier(name string) string {
	plain := true
	for i := range len(name) {
		plain = plain && ' ' <= name[i] && name[i] <= '~'
	}
	if plain {
		return plainIdentifier(name)
	}
	var text strings.Builder
	text.WriteString(`U&"`)
	for _, r := range name {
		switch {
		case r == '"':
			text.WriteString(`""`)
		case r == '\\':
			text.WriteString(`\\`)
		case ' ' <= r && r <= '~':
			text.WriteByte(byte(r))
		default:
			fmt.Fprintf(&text, `\+%06x`, r)
		}
	}
	text.WriteByte('"')
	return text.String()
}

func plainIdentifier(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }
