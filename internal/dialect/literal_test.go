package dialect_test

import (
	"testing"

	"github.com/devmappa/watermill-inbox/internal/dialect"
)

func TestLiteralsAndIdentifiersAreASCII(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]struct{ literal, identifier string }{
		``:             {`''`, `""`},
		`a b`:          {`'a b'`, `"a b"`},
		`it's`:         {`E'it''s'`, `"it's"`},
		`\u0041`:       {`E'\\u0041'`, `"\u0041"`},
		`é"`:           {`E'\u00e9"'`, `U&"\+0000e9"""`},
		"\x01\n~":      {`E'\u0001\u000a~'`, `U&"\+000001\+00000a~"`},
		`🙂\`:           {`E'\U0001f642\\'`, `U&"\+01f642\\"`},
		"\u007f\ufffd": {`E'\u007f\ufffd'`, `U&"\+00007f\+00fffd"`},
	} {
		if got := dialect.Literal(text); got != want.literal {
			t.Errorf("literal of %q: %s, want %s", text, got, want.literal)
		}
		if got := dialect.Identifier(text); got != want.identifier {
			t.Errorf("identifier %q: %s, want %s", text, got, want.identifier)
		}
	}
}
