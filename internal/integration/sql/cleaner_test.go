package sql_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

func cleanerOf(t testing.TB, records inbox.Records, options inbox.CleanerOptions) *inbox.Cleaner {
	t.Helper()
	if options.Retention.Default == 0 {
		options.Retention.Default = time.Hour
	}
	if options.BatchPause == 0 {
		options.BatchPause = time.Nanosecond
	}
	options.Consumers = inbox.AllConsumers()
	cleaner, err := inbox.NewCleaner(records, options)
	if err != nil {
		t.Fatal(err)
	}
	return cleaner
}

func addExpired(t testing.TB, db *testdb.Database, consumer string, n int) {
	t.Helper()
	db.MustExec(t, fmt.Sprintf(`INSERT INTO watermill_inbox (consumer, message_id, processed_at)
		SELECT '%s', 'old-' || i, now() - interval '1 day' FROM generate_series(1, %d) i`, consumer, n))
}

// While another instance's batch is at work, a cleaner leaves the table to it. When that instance dies, the next
// pass goes on.
func TestTwoCleanersOneKilled(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		repository := db.Repository(t, inboxsql.Options{})
		addExpired(t, db, "c", 10)
		other, err := db.BeginTx(context.Background(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = other.Rollback() }()
		query := dialect.PostgreSQL{}.CleanerLock(tableOf(t, db))
		var locked int
		if err := other.QueryRow(query.Text).Scan(&locked); err != nil || locked != 1 {
			t.Fatalf("%d, %v", locked, err)
		}
		pid := sessionOf(t, other)
		cleaner := cleanerOf(t, repository, inbox.CleanerOptions{})
		if pass, err := cleaner.Pass(context.Background()); err != nil || pass != (inbox.CleanerPass{Yielded: true}) {
			t.Fatalf("beside another one: %+v, %v", pass, err)
		}
		if _, _, err := repository.DeleteProcessed(context.Background(), inbox.DeleteProcessedParams{Consumer: "c", Before: time.Now().Add(-time.Hour), Limit: 1}); !errors.Is(err, inbox.ErrCleaning) {
			t.Fatalf("the error is %v, want ErrCleaning", err)
		}
		terminate(t, db.Open(t), pid)
		eventually(t, "the next one goes on", func() bool {
			pass, err := cleaner.Pass(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			return pass.Deleted == 10
		})
	})
}

// tableOf is the table with its schema, as the repository has found it.
func tableOf(t testing.TB, db *testdb.Database) dialect.Table {
	t.Helper()
	var schema string
	if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
		t.Fatal(err)
	}
	table, err := dialect.ParseTable(schema + ".watermill_inbox")
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func TestCleanerWithoutTableOrIndex(t *testing.T) {
	t.Parallel()
	for name, db := range map[string]*testdb.Database{"PostgreSQL": testdb.PostgreSQL(t, "postgres"), "SQLite": testdb.SQLite(t)} {
		t.Run(name, func(t *testing.T) {
			if _, err := cleanerOf(t, db.RepositoryWithoutSchema(t, inboxsql.Options{}), inbox.CleanerOptions{}).Pass(context.Background()); err == nil {
				t.Error("a pass without a table succeeded")
			}
			repository := db.Repository(t, inboxsql.Options{})
			db.MustExec(t, `DROP INDEX watermill_inbox_consumer_processed_at_idx`)
			for _, id := range []string{"old", "young"} {
				if _, err := wrap(t, repository, inbox.Options{Consumer: func(string) string { return "c" }}, func(*message.Message) error { return nil })(newMessage(id)); err != nil {
					t.Fatal(err)
				}
			}
			if err := db.Age(context.Background(), inbox.Key{Consumer: "c", MessageID: "old"}, 2*time.Hour); err != nil {
				t.Fatal(err)
			}
			// A claim needs no index, and to make one locks the table, so Check and InitializeSchema say nothing.
			if err := repository.InitializeSchema(context.Background()); err != nil {
				t.Error(err)
			}
			logger := watermill.NewCaptureLogger()
			if pass, err := cleanerOf(t, repository, inbox.CleanerOptions{Logger: logger}).Pass(context.Background()); err != nil || pass.Deleted != 1 {
				t.Errorf("without the index: %+v, %v", pass, err)
			}
			lines := logger.Captured()[watermill.ErrorLogLevel]
			if len(lines) != 1 || !strings.Contains(fmt.Sprint(lines[0].Fields["advice"]), "no index begins with (consumer, processed_at)") {
				t.Errorf("without the index the cleaner says %v", lines)
			}
			for _, index := range []string{`watermill_inbox (consumer, processed_at, message_id)`, `watermill_inbox (processed_at, consumer)`, `watermill_inbox (consumer, processed_at) WHERE message_id > 'x'`} {
				db.MustExec(t, `CREATE INDEX another ON `+index)
				advice, err := repository.Advice(context.Background())
				if fine := strings.HasSuffix(index, "message_id)"); err != nil || (len(advice) == 0) != fine {
					t.Errorf("with %s: %q, %v", index, advice, err)
				}
				db.MustExec(t, `DROP INDEX another`)
			}
		})
	}
}

// The next version's schema is applied while this version claims and cleans.
func TestCleanerDuringTheNextSchema(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.SetMaxOpenConns(8)
	repository := db.Repository(t, inboxsql.Options{})
	stop := load(t, db, repository)
	var deleted int
	for i, statement := range []string{
		`SELECT 1`,
		`ALTER TABLE watermill_inbox ADD COLUMN added_later text`,
		`CREATE INDEX CONCURRENTLY added_later ON watermill_inbox (added_later)`,
		`ALTER TABLE watermill_inbox ADD COLUMN with_default int NOT NULL DEFAULT 7`,
	} {
		addExpired(t, db, fmt.Sprint("c", i), 500)
		applied := make(chan error, 1)
		go func() {
			_, err := db.Exec(statement)
			applied <- err
		}()
		pass, err := cleanerOf(t, repository, inbox.CleanerOptions{BatchSize: 50}).Pass(context.Background())
		if err != nil {
			t.Fatalf("during %s: %v", statement, err)
		}
		deleted += pass.Deleted
		if err := <-applied; err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
	messages := stop()
	if got := db.Count(t, `SELECT count(*) FROM effects`); got != messages {
		t.Errorf("%d effects of %d messages", got, messages)
	}
	if deleted != 4*500 {
		t.Errorf("%d deleted, want all that was expired", deleted)
	}
}

// SQLite has one writer at a time; a cleaner is one more.
func TestSQLiteCleanerBesideTwoWriters(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t)
	db.SetMaxOpenConns(4)
	repository := db.Repository(t, inboxsql.Options{})
	for i := range 300 {
		db.MustExec(t, `INSERT INTO watermill_inbox (consumer, message_id, processed_at)
			VALUES ('c', 'old-' || $1, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) - 86400000)`, i)
	}
	handler := wrap(t, repository, inbox.Options{Consumer: func(string) string { return "c" }}, func(msg *message.Message) error {
		return db.Write(msg.Context(), msg.UUID)
	})
	const messages = 200
	var group sync.WaitGroup
	for writer := range 2 {
		group.Go(func() {
			for i := range messages {
				for range 2 { // a copy of each
					if _, err := handler(newMessage(fmt.Sprint(writer, "-", i))); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	var deleted atomic.Int32
	group.Go(func() {
		for deadline := time.Now().Add(patience); deleted.Load() < 300 && time.Now().Before(deadline); {
			pass, err := cleanerOf(t, repository, inbox.CleanerOptions{BatchSize: 7}).Pass(context.Background())
			if err != nil {
				t.Error(err)
				return
			}
			deleted.Add(int32(pass.Deleted))
		}
	})
	group.Wait()
	if got := db.Count(t, `SELECT count(DISTINCT effect) FROM effects`); got != 2*messages {
		t.Errorf("%d messages have an effect, want %d", got, 2*messages)
	}
	if got := db.Count(t, `SELECT count(*) FROM effects`); got != 2*messages {
		t.Errorf("%d effects, want %d", got, 2*messages)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != 2*messages || deleted.Load() != 300 {
		t.Errorf("%d records left and %d deleted", got, deleted.Load())
	}
}

// A consumer that keeps all its records costs the others nothing: no batch reads them.
func TestCleanerReadsOnlyWhatItDeletes(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Repository(t, inboxsql.Options{})
	addExpired(t, db, "kept", 20_000)
	addExpired(t, db, "cleaned", 20_000)
	db.MustExec(t, `ANALYZE watermill_inbox`)
	query := dialect.PostgreSQL{}.DeleteProcessed(tableOf(t, db), inbox.DeleteProcessedParams{Consumer: "cleaned", Before: time.Now().Add(-time.Hour), Limit: 100})
	consumers := dialect.PostgreSQL{}.Consumers(tableOf(t, db))
	undeleted := dialect.PostgreSQL{}.Undeleted(tableOf(t, db), inbox.DeleteProcessedParams{Consumer: "cleaned", Before: time.Now().Add(-time.Hour)})
	for _, statement := range []string{query.Text, consumers.Text, undeleted.Text} {
		var plan []byte
		if err := db.QueryRow(`EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ` + statement).Scan(&plan); err != nil {
			t.Fatal(err)
		}
		var hit, read int
		if err := db.QueryRow(`SELECT ($1::jsonb -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::int, ($1::jsonb -> 0 -> 'Plan' ->> 'Shared Read Blocks')::int`, string(plan)).Scan(&hit, &read); err != nil {
			t.Fatal(err)
		}
		if blocks := hit + read; blocks > 600 { // the table has far more
			t.Errorf("%d blocks for\n%s\n%s", blocks, statement, plan)
		}
	}
}

// Expired records with unsent messages are deleted like others, so a batch steps over none of them. Their messages stay
// and are counted.
func TestCleanerIsNotHeldUpByUnsentMessages(t *testing.T) {
	t.Parallel()
	const unsent, others = 20_000, 2_000
	db := testdb.PostgreSQL(t, "postgres")
	repository := db.Repository(t, inboxsql.Options{})
	db.MustExec(t, fmt.Sprintf(`WITH record AS (INSERT INTO watermill_inbox SELECT 'c', 'unsent-' || i, now() - interval '2 days' FROM generate_series(1, %d) i RETURNING *)
		INSERT INTO watermill_inbox_unsent SELECT consumer, message_id, processed_at, processed_at, NULL, 'events', '\x00' FROM record`, unsent))
	addExpired(t, db, "c", others)
	pass, err := cleanerOf(t, repository, inbox.CleanerOptions{}).Pass(context.Background())
	if err != nil || pass != (inbox.CleanerPass{Deleted: unsent + others, Unsent: unsent}) {
		t.Errorf("%+v, %v", pass, err)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent`); got != unsent {
		t.Errorf("the messages of %d records are left", got)
	}
}

// slowDeletion makes each deletion of a record take five milliseconds.
const slowDeletion = `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.005); RETURN OLD; END';
	CREATE TRIGGER slow BEFORE DELETE ON watermill_inbox FOR EACH ROW EXECUTE FUNCTION slow()`

// Whoever ends a batch that takes too long, the cleaner or the server, smaller ones follow.
func TestCleanerUnderATimeout(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		for name, c := range map[string]struct {
			setting string
			options inbox.CleanerOptions
		}{
			"its own":     {"", inbox.CleanerOptions{BatchTimeout: 300 * time.Millisecond}},
			"the session": {"&statement_timeout=300", inbox.CleanerOptions{}},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				db := testdb.PostgreSQL(t, driver)
				db.URL += c.setting
				db.DB = db.Open(t)
				repository := db.Repository(t, inboxsql.Options{})
				db.MustExec(t, slowDeletion)
				addExpired(t, db, "c", 150)
				c.options.BatchSize = 100
				pass, err := cleanerOf(t, repository, c.options).Pass(context.Background())
				if err != nil || pass != (inbox.CleanerPass{Deleted: 150}) {
					t.Errorf("%+v, %v", pass, err)
				}
			})
		}
	})
}

// A table that somebody else has locked for longer than the session may wait is no other error, and after the smallest
// batch the pass says so.
func TestCleanerUnderALockTimeout(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		repository := db.Repository(t, inboxsql.Options{})
		addExpired(t, db, "c", 20)
		other, err := db.BeginTx(context.Background(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = other.Rollback() }()
		if _, err := other.Exec(`LOCK TABLE watermill_inbox IN SHARE MODE`); err != nil {
			t.Fatal(err)
		}
		asRole := *db
		asRole.URL += "&lock_timeout=50"
		asRole.DB = asRole.Open(t)
		impatient := asRole.RepositoryWithoutSchema(t, inboxsql.Options{})
		if pass, err := cleanerOf(t, impatient, inbox.CleanerOptions{BatchSize: 20}).Pass(context.Background()); !errors.Is(err, inbox.ErrBatchTimeout) || pass != (inbox.CleanerPass{}) {
			t.Errorf("%+v, %v", pass, err)
		}
		if err := other.Rollback(); err != nil {
			t.Fatal(err)
		}
		if pass, err := cleanerOf(t, repository, inbox.CleanerOptions{}).Pass(context.Background()); err != nil || pass.Deleted != 20 {
			t.Errorf("%+v, %v", pass, err)
		}
	})
}

// The wait for a connection is not the batch's time. It ends with the context.
func TestCleanerWaitsForAConnection(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		const timeout = time.Second
		db := testdb.PostgreSQL(t, driver)
		repository := db.Repository(t, inboxsql.Options{})
		addExpired(t, db, "c", 20)
		db.SetMaxOpenConns(1)
		handler, err := db.Conn(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = handler.Close() }()
		params := inbox.DeleteProcessedParams{Consumer: "c", Before: time.Now().Add(-time.Hour), Limit: 20, Timeout: timeout}
		impatient, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		if _, _, err := repository.DeleteProcessed(impatient, params); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, inbox.ErrBatchTimeout) {
			t.Errorf("the wait has ended with %v", err)
		}
		time.AfterFunc(timeout*3/2, func() { _ = handler.Close() })
		if deleted, _, err := repository.DeleteProcessed(context.Background(), params); err != nil || deleted != 20 {
			t.Errorf("%d deleted, %v", deleted, err)
		}
	})
}

// What the database does not let a role delete is an error of the cleaner and of Forget, and not "nothing was expired".
func TestRecordsThatTheDatabaseKeeps(t *testing.T) {
	t.Parallel()
	const (
		secured  = `ALTER TABLE watermill_inbox ENABLE ROW LEVEL SECURITY; CREATE POLICY seen ON watermill_inbox FOR SELECT USING (true);`
		lockable = `CREATE POLICY locked ON watermill_inbox FOR UPDATE USING (true);`
	)
	for name, c := range map[string]struct {
		ddl     string
		deleted int
	}{
		"policies for SELECT":            {secured, 0},
		"policies for SELECT and UPDATE": {secured + lockable, 0},
		"a policy for most records":      {secured + lockable + `CREATE POLICY most ON watermill_inbox FOR DELETE USING (message_id <> 'old-7')`, 9},
		"a trigger": {`CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
			CREATE TRIGGER keep BEFORE DELETE ON watermill_inbox FOR EACH ROW EXECUTE FUNCTION keep()`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			drivers(t, func(t *testing.T, driver string) {
				db := testdb.PostgreSQL(t, driver)
				db.Repository(t, inboxsql.Options{})
				addExpired(t, db, "c", 10)
				role := "role_" + testdb.RandomName()
				db.MustExec(t, `CREATE ROLE `+role+` LOGIN`)
				t.Cleanup(func() { db.MustExec(t, `DROP OWNED BY `+role); db.MustExec(t, `DROP ROLE `+role) })
				db.MustExec(t, `GRANT USAGE ON SCHEMA `+tableOf(t, db).Schema()+` TO `+role)
				db.MustExec(t, `GRANT SELECT, UPDATE, DELETE ON watermill_inbox, watermill_inbox_unsent TO `+role)
				db.MustExec(t, c.ddl)
				asRole := *db
				asRole.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+role+"@", 1)
				asRole.DB = asRole.Open(t)
				repository := asRole.RepositoryWithoutSchema(t, inboxsql.Options{})
				pass, err := cleanerOf(t, repository, inbox.CleanerOptions{}).Pass(context.Background())
				if err == nil || !strings.Contains(err.Error(), "row level security") || pass != (inbox.CleanerPass{Deleted: c.deleted}) {
					t.Errorf("%+v, %v", pass, err)
				}
				left := 10 - c.deleted
				if deleted, err := inbox.Forget(context.Background(), repository, inbox.Selection{Consumer: "c"}, left); err == nil || deleted != 0 {
					t.Errorf("%d forgotten, %v", deleted, err)
				}
				if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != left {
					t.Errorf("%d records are left, want %d", got, left)
				}
			})
		})
	}
}

// Records that a session has locked are passed over, and nothing is wrong.
func TestCleanerPassesOverLockedRecords(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		repository := db.Repository(t, inboxsql.Options{})
		addExpired(t, db, "c", 10)
		for strength, ids := range map[string]string{"UPDATE": "old-[12]", "KEY SHARE": "old-[34]"} {
			other, err := db.BeginTx(context.Background(), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = other.Rollback() }()
			if _, err := other.Exec(`SELECT 1 FROM watermill_inbox WHERE message_id ~ $1 FOR `+strength, "^"+ids+"$"); err != nil {
				t.Fatal(err)
			}
		}
		pass, err := cleanerOf(t, repository, inbox.CleanerOptions{}).Pass(context.Background())
		if err != nil || pass != (inbox.CleanerPass{Deleted: 6}) {
			t.Errorf("%+v, %v", pass, err)
		}
	})
}

// Records that are committed while the cleaner looks are not taken for kept ones, even where handlers are open for longer
// than the retention.
func TestCleanerIsNotAlarmedByClaims(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.SetMaxOpenConns(8)
	repository := db.Repository(t, inboxsql.Options{})
	var group sync.WaitGroup
	var claiming atomic.Int32
	for worker := range 4 {
		claiming.Add(1)
		group.Go(func() {
			defer claiming.Add(-1)
			for i := range 200 {
				if free, err := claim(context.Background(), repository, fmt.Sprint(worker, "-", i)); err != nil || !free {
					t.Errorf("free: %v, %v", free, err)
				}
			}
		})
	}
	for claiming.Load() > 0 {
		if pass, err := cleanerOf(t, repository, inbox.CleanerOptions{Retention: inbox.Retention{Default: time.Nanosecond}}).Pass(context.Background()); err != nil {
			t.Fatalf("%+v, %v", pass, err)
		}
	}
	group.Wait()
}

// A relay that leases messages while they are deleted moves their row away from under the deletion.
func TestCleanerDeletesWhatIsLeasedMeanwhile(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		repository := db.Repository(t, inboxsql.Options{})
		db.MustExec(t, `INSERT INTO watermill_inbox_unsent SELECT 'c', 'old-' || i, now() - interval '1 day', now() - interval '1 day', NULL, 'events', '\x00' FROM generate_series(1, 3) i`)
		relay, err := db.BeginTx(context.Background(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = relay.Rollback() }()
		if _, err := relay.Exec(`UPDATE watermill_inbox_unsent SET leased_until = now() WHERE message_id = 'old-2'`); err != nil {
			t.Fatal(err)
		}
		pid := sessionOf(t, relay)
		type result struct {
			inbox.CleanerPass
			err error
		}
		done := make(chan result, 1)
		go func() {
			pass, err := cleanerOf(t, repository, inbox.CleanerOptions{UnsentRetention: time.Hour}).Pass(context.Background())
			done <- result{pass, err}
		}()
		eventually(t, "the deletion waits for the relay", func() bool {
			return db.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))`, pid) > 0
		})
		if err := relay.Commit(); err != nil {
			t.Fatal(err)
		}
		if got := <-done; got.err != nil || got.CleanerPass != (inbox.CleanerPass{UnsentDeleted: 3}) {
			t.Errorf("%+v", got)
		}
	})
}
