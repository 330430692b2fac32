package sql_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/mattn/go-sqlite3" // driver "sqlite3"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// TestSQLiteDrivers: the outcomes are the same with both common drivers, which tell SQLite's result code in different
// ways.
func TestSQLiteDrivers(t *testing.T) {
	t.Parallel()
	for driver, parameters := range map[string]string{
		"sqlite":  "_pragma=busy_timeout(100)&_pragma=journal_mode(WAL)&_pragma=foreign_keys(1)",
		"sqlite3": "_busy_timeout=100&_journal_mode=WAL&_foreign_keys=1",
	} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			db := testdb.SQLiteBy(t, driver, parameters)
			db.MustExec(t, `CREATE TABLE parent (id integer PRIMARY KEY)`)
			db.MustExec(t, `CREATE TABLE child (parent integer REFERENCES parent DEFERRABLE INITIALLY DEFERRED)`)
			app := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{})
			app.router.AddMiddleware(app.order()...)
			app.handle("handler", "in", func(msg *message.Message) error {
				tx, _ := inboxsql.TxFromContext(msg.Context())
				switch string(msg.Payload) {
				case "orphan":
					_, err := tx.Exec(`INSERT INTO child VALUES (7)`)
					return err
				case "ended":
					_, err := tx.Exec(`COMMIT`)
					return err
				}
				return db.Write(msg.Context(), msg.UUID)
			})
			app.run()
			app.publish("in", newMessage("orphan"), newMessage("ended"), newMessage("good"), newMessage("good"))
			poisoned := app.wantPoisoned("orphan", "ended")
			for i, want := range []string{"FOREIGN KEY constraint failed", "it has ended it"} {
				if reason := poisoned[i].Metadata.Get("reason_poisoned"); !strings.Contains(reason, want) || strings.Contains(reason, "ended") != (i == 1) {
					t.Errorf("the reason is %q, want %q", reason, want)
				}
			}
			app.wantEffects("good")
			app.wantClaims(2) // the handler has committed the one of "ended"

			locking, err := db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = locking.Rollback() }()
			if _, err := locking.Exec(`INSERT INTO effects VALUES ('first')`); err != nil {
				t.Fatal(err)
			}
			_, locked := db.Exec(`INSERT INTO effects VALUES ('second')`)

			small := testdb.SQLiteBy(t, driver, parameters)
			small.SetMaxOpenConns(1)
			small.MustExec(t, `PRAGMA max_page_count = 8`)
			_, full := small.Exec(`INSERT INTO effects VALUES (hex(zeroblob(1000000)))`)

			for what, err := range map[string]error{"locked": locked, "full": full} {
				if wrapped := fmt.Errorf("book: %w", errors.Join(errors.New("also"), err)); err == nil || inbox.ShouldPoison(wrapped) {
					t.Errorf("%s: %v would be poisoned", what, err)
				}
			}
		})
	}
}
