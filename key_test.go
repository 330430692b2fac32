package inbox_test

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

func FuzzKeyValidate(f *testing.F) {
	for _, part := range []string{"", "a", "a\x00", "\xff", "\xed\xa0\x80", "日本語", strings.Repeat("x", 255), strings.Repeat("x", 256)} {
		f.Add(part, "id")
		f.Add("consumer", part)
	}
	valid := func(part string) bool {
		return part != "" && len(part) <= 255 && utf8.ValidString(part) && !strings.Contains(part, "\x00")
	}
	f.Fuzz(func(t *testing.T, consumer, id string) {
		err := inbox.Key{Consumer: consumer, MessageID: id}.Validate()
		if (err == nil) != (valid(consumer) && valid(id)) {
			t.Fatalf("%q, %q: %v", consumer, id, err)
		}
		if err != nil && !errors.Is(err, inbox.ErrInvalidKey) {
			t.Fatalf("%v does not match ErrInvalidKey", err)
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
