package inbox_test

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// FuzzKeyValidate: a key is valid exactly if both parts are, and the error names the first that is not, in text
// that any log can hold.
func FuzzKeyValidate(f *testing.F) {
	for _, part := range []string{"", "a", "a\x00", "\xff", "\xed\xa0\x80", "日本語", strings.Repeat("x", 255), strings.Repeat("x", 256),
		strings.Repeat("語", 85), strings.Repeat("語", 86), strings.Repeat("x", 254) + "é", "message id is empty", "\u2028\ufffd"} {
		f.Add(part, "id")
		f.Add("consumer", part)
		f.Add(part, part)
	}
	valid := func(part string) bool {
		return len(part) >= 1 && len(part) <= 255 && string([]rune(part)) == part && !strings.Contains(part, "\x00")
	}
	f.Fuzz(func(t *testing.T, consumer, id string) {
		err := inbox.Key{Consumer: consumer, MessageID: id}.Validate()
		wrong := ""
		switch {
		case !valid(consumer):
			wrong = "consumer"
		case !valid(id):
			wrong = "message id"
		}
		if wrong == "" {
			if err != nil {
				t.Fatalf("%q, %q: %v", consumer, id, err)
			}
			return
		}
		if !errors.Is(err, inbox.ErrInvalidKey) || !strings.HasPrefix(err.Error(), "invalid key: "+wrong+" ") {
			t.Fatalf("%q, %q: the error is %v, it should name the %s", consumer, id, err, wrong)
		}
		if text := err.Error(); !utf8.ValidString(text) || strings.ContainsAny(text, "\x00\n") {
			t.Fatalf("the error is not printable: %q", text)
		}
	})
}

func TestMessageID(t *testing.T) {
	t.Parallel()
	msg := message.NewMessage("uuid", nil)
	msg.Metadata.Set("order", "order-7")
	order, missing := inbox.MessageIDFromMetadata("order"), inbox.MessageIDFromMetadata("missing")
	for name, c := range map[string]struct {
		function func(*message.Message) string
		want     string
	}{
		"UUID":               {inbox.MessageUUID, "uuid"},
		"metadata":           {order, "order-7"},
		"missing metadata":   {missing, ""},
		"first of several":   {inbox.FirstMessageID(missing, order, inbox.MessageUUID), "order-7"},
		"first that has one": {inbox.FirstMessageID(missing, inbox.MessageUUID), "uuid"},
		"none of several":    {inbox.FirstMessageID(missing, missing), ""},
		"none given":         {inbox.FirstMessageID(), ""},
	} {
		if got := c.function(msg); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
