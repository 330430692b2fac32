package inboxsql_test

import (
	"strings"
	"testing"

	inbox "github.com/devmappa/watermill-inbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// The claim names the key's columns as its conflict target: a bare clause would take any conflict, of an
// index that somebody adds, for a duplicate.
func TestClaimNamesItsConflictTarget(t *testing.T) {
	t.Parallel()
	table, err := inboxsql.ParseTable("shop.inbox")
	if err != nil {
		t.Fatal(err)
	}
	params := inboxsql.KeyParams{Table: table, Key: inbox.Key{Consumer: `it's`, MessageID: `\1`}}
	for name, text := range map[string]string{
		"PostgreSQL":        inboxsql.DefaultPostgreSQLSchema{}.ClaimQuery(params).Query,
		"PostgreSQL, fused": inboxsql.DefaultPostgreSQLSchema{}.BeginClaimQuery(params).Query,
		"SQLite":            inboxsql.DefaultSQLiteSchema{}.ClaimQuery(params).Query,
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
