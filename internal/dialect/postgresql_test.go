package dialect_test

import (
	"strings"
	"testing"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// The claim names the key's columns as its conflict target: a bare clause would take any conflict, of an
// index that somebody adds, for a duplicate.
func TestClaimNamesItsConflictTarget(t *testing.T) {
	t.Parallel()
	table, err := dialect.ParseTable("shop.inbox")
	if err != nil {
		t.Fatal(err)
	}
	key := inbox.Key{Consumer: `it's`, MessageID: `\1`}
	for name, text := range map[string]string{
		"PostgreSQL":        dialect.PostgreSQL{}.Claim(table, key).Text,
		"PostgreSQL, fused": dialect.PostgreSQL{}.BeginClaim(table, key).Text,
		"SQLite":            dialect.SQLite{}.Claim(table, key).Text,
	} {
		if !strings.HasSuffix(text, `ON CONFLICT ("consumer", "message_id") DO NOTHING`) {
			t.Errorf("%s: %s", name, text)
		}
		if !strings.HasPrefix(text, `INSERT INTO "shop"."inbox" `) {
			t.Errorf("%s: %s", name, text)
		}
		if name != "SQLite" && (!strings.Contains(text, `'it''s'`) || !strings.Contains(text, ` E'\\1'`)) {
			t.Errorf("%s: %s", name, text)
		}
	}
}
