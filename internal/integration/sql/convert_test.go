package sql_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	"github.com/devmappa/watermill-inbox/partitions"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

func newPartitions(t testing.TB, db *testdb.Database) *partitions.Partitions {
	t.Helper()
	keeper, err := partitions.New(db.DB, partitions.Options{IDs: inbox.UUIDv7, Retention: 24 * time.Hour, Ahead: 2 * 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	return keeper
}

// load sends messages, each in two copies, until it is stopped, and returns their number.
func load(t testing.TB, db *testdb.Database, repository inbox.Repository) (stop func() int) {
	t.Helper()
	handle := wrap(t, repository, inbox.Options{}, func(msg *message.Message) error {
		if strings.HasSuffix(msg.UUID, "7") {
			// Longer than the first tries for an exclusive lock, so that they are seen to be given up.
			tx, _ := inboxsql.TxFromContext(msg.Context())
			if _, err := tx.ExecContext(msg.Context(), `SELECT pg_sleep(0.15)`); err != nil {
				return err
			}
		}
		return db.Write(msg.Context(), msg.UUID)
	})
	var (
		group sync.WaitGroup
		last  atomic.Int64
		ended atomic.Bool
	)
	for range 3 {
		group.Add(1)
		go func() {
			defer group.Done()
			for !ended.Load() {
				id := young(int(last.Add(1)))
				var copies sync.WaitGroup
				for range 2 {
					copies.Add(1)
					go func() {
						defer copies.Done()
						if _, err := handle(newMessage(id)); err != nil {
							t.Errorf("%s: %v", id, err)
						}
					}()
				}
				copies.Wait()
			}
		}()
	}
	eventually(t, "messages are handled", func() bool { return last.Load() > 20 })
	return func() int {
		ended.Store(true)
		group.Wait()
		return int(last.Load())
	}
}

// wantOnce fails the test unless each message had its effect once, and copies of all of them are duplicates.
func wantOnce(t testing.TB, db *testdb.Database, messages int) {
	t.Helper()
	effects, err := db.Effects(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(effects)
	if once := slices.Compact(slices.Clone(effects)); len(effects) != messages || len(once) != messages {
		t.Errorf("%d effects, %d different ones, of %d messages", len(effects), len(once), messages)
	}
	db.Adapter = inboxsql.PartitionedPostgreSQLSchema{IDs: inbox.UUIDv7}
	repository := db.Repository(t, inboxsql.Options{})
	for _, id := range effects {
		wantClaim(t, repository, id, false)
	}
}

func TestConvertUnderLoad(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		db.SetMaxOpenConns(10)
		stop := load(t, db, db.Repository(t, inboxsql.Options{}))
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := newPartitions(t, db).Convert(ctx); err != nil {
			t.Error(err)
		}
		before := db.Count(t, `SELECT count(*) FROM watermill_inbox`)
		eventually(t, "messages are handled after it", func() bool { return db.Count(t, `SELECT count(*) FROM watermill_inbox`) > before+20 })
		wantOnce(t, db, stop())
		if got := db.Count(t, `SELECT count(*) FROM pg_constraint WHERE contype = 'c' AND connamespace = current_schema()::regnamespace`); got != 0 {
			t.Errorf("%d CHECKs are left", got)
		}
		if got := db.Count(t, `SELECT count(*) FROM pg_indexes WHERE schemaname = current_schema() AND tablename = 'watermill_inbox' AND indexname IN ('watermill_inbox_pkey', 'watermill_inbox_consumer_processed_at_idx')`); got != 2 {
			t.Errorf("%d indexes have their names", got)
		}
		if got := db.Count(t, `SELECT count(*) FROM watermill_inbox_old`); got < 20 {
			t.Errorf("the old table has %d records", got)
		}
		if done := pass(t, newPartitions(t, db)); len(done.Created)+len(done.Retired) != 0 || done.Left < 2*24*time.Hour {
			t.Errorf("the pass after it says %+v", done)
		}
		wantIdle(t, db)
	})
}

// A handler that stays open keeps the conversion waiting, and other claims for a moment at a time.
func TestConvertBesideAnOpenHandler(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		repository := db.Repository(t, inboxsql.Options{})
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		handler, _, err := repository.Claim(ctx, inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: young(1)}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = handler.Rollback() }()
		converted := make(chan error, 1)
		go func() { converted <- newPartitions(t, db).Convert(ctx) }()
		waiting := `SELECT count(*) FROM pg_locks WHERE relation = 'watermill_inbox'::regclass AND mode = 'AccessExclusiveLock' AND NOT granted`
		for try := range 3 {
			eventually(t, "the conversion waits", func() bool { return db.Count(t, waiting) == 1 })
			wantClaim(t, repository, young(2+try), true)
		}
		if err := handler.Commit(ctx); err != nil {
			t.Fatal(err)
		}
		if err := <-converted; err != nil {
			t.Fatal(err)
		}
		wantClaim(t, repository, young(1), false)
	})
}

// Interrupted anywhere, again and again, it goes on.
func TestConvertInterrupted(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.SetMaxOpenConns(10)
	repository := db.Repository(t, inboxsql.Options{})
	for n := range 20 {
		wantClaim(t, repository, testdb.ID(inbox.UUIDv7, time.Unix(int64(n), 0), n), true)
	}
	stop := load(t, db, repository)
	tries := 1
	for limit := time.Millisecond; ; limit += limit/4 + time.Millisecond {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		err := newPartitions(t, db).Convert(ctx)
		cancel()
		if err == nil {
			break
		}
		if limit > patience {
			t.Fatal(err)
		}
		tries++
	}
	t.Logf("%d tries", tries)
	wantOnce(t, db, stop())
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox_old WHERE message_id < '01'`); got != 20 {
		t.Errorf("%d old records", got)
	}
}

// What an interrupted conversion has left is taken up, or renewed if that was long ago.
func TestConvertTakesUp(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		bound    time.Time
		validate bool
		wantOld  bool // the bound
	}{
		"a CHECK":           {daysAgo(-2), false, true},
		"a validated CHECK": {daysAgo(-2), true, true},
		"a stale CHECK":     {daysAgo(0), false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			repository := db.Repository(t, inboxsql.Options{})
			wantClaim(t, repository, young(1), true)
			bound := inbox.UUIDv7.Bound(c.bound)
			db.MustExec(t, fmt.Sprintf(`ALTER TABLE watermill_inbox ADD CONSTRAINT "watermill_inbox_below_%[1]s" CHECK (message_id < '%[1]s') NOT VALID`, bound))
			if c.validate {
				db.MustExec(t, fmt.Sprintf(`ALTER TABLE watermill_inbox VALIDATE CONSTRAINT "watermill_inbox_below_%s"`, bound))
			}
			for range 2 { // the second finds it done
				if err := newPartitions(t, db).Convert(context.Background()); err != nil {
					t.Fatal(err)
				}
			}
			var bounds string
			if err := db.QueryRow(`SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid = 'watermill_inbox_old'::regclass`).Scan(&bounds); err != nil {
				t.Fatal(err)
			}
			if strings.Contains(bounds, bound) != c.wantOld {
				t.Errorf("the bounds are %s", bounds)
			}
			wantClaim(t, repository, young(1), false)
		})
	}
}

func TestConvertULIDs(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	repository := db.Repository(t, inboxsql.Options{})
	id := watermill.NewULID()
	wantClaim(t, repository, id, true)
	if err := newPartitions(t, db).Convert(context.Background()); err == nil || !strings.Contains(err.Error(), "1 records have ids that are not UUIDv7s") {
		t.Fatalf("to UUIDv7s: %v", err)
	}
	keeper, err := partitions.New(db.DB, partitions.Options{IDs: inbox.ULID, Retention: 24 * time.Hour, Ahead: 2 * 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if err := keeper.Convert(context.Background()); err != nil {
		t.Fatal(err)
	}
	db.Adapter = inboxsql.PartitionedPostgreSQLSchema{IDs: inbox.ULID}
	repository = db.Repository(t, inboxsql.Options{})
	wantClaim(t, repository, id, false)
	wantClaim(t, repository, watermill.NewULID(), true)
	if err := newPartitions(t, db).Convert(context.Background()); err == nil || !strings.Contains(err.Error(), "ids of another kind") {
		t.Errorf("to UUIDv7s, afterwards: %v", err)
	}
}

func TestConvertInManyInstancesAtOnce(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.SetMaxOpenConns(12)
	stop := load(t, db, db.Repository(t, inboxsql.Options{}))
	var group sync.WaitGroup
	for range 3 {
		group.Add(1)
		go func() {
			defer group.Done()
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if err := newPartitions(t, db).Convert(ctx); err != nil {
				t.Error(err)
			}
		}()
	}
	group.Wait()
	wantOnce(t, db, stop())
}

// A table that cannot be converted is left as it was.
func TestConvertRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ ddl, want string }{
		"no table": {`DROP TABLE watermill_inbox`, "no such table"},
		"ids of another kind": {`INSERT INTO watermill_inbox (consumer, message_id) VALUES ('c', '01ARZ3NDEKTSV4RRFFQ69G5FAV'), ('c', '017F22E2-79B0-7CC3-98C4-DC0C0C07398F')`,
			"2 records have ids that are not UUIDv7s"},
		"an id of the year 10889": {`INSERT INTO watermill_inbox (consumer, message_id) VALUES ('c', 'ffffffff-ffff-7000-8000-000000000000')`, "1 records have ids"},
		"another collation":       {`ALTER TABLE watermill_inbox ALTER message_id TYPE text COLLATE "und-x-icu"`, `must be COLLATE "C"`},
		"a trigger": {`CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
			CREATE TRIGGER mine BEFORE INSERT ON watermill_inbox FOR EACH ROW EXECUTE FUNCTION f()`, "the trigger mine"},
		"a rule":                     {`CREATE RULE mine AS ON DELETE TO watermill_inbox DO INSTEAD NOTHING`, "the rule mine"},
		"a policy":                   {`ALTER TABLE watermill_inbox ENABLE ROW LEVEL SECURITY`, "row level security"},
		"a view":                     {`CREATE VIEW v AS SELECT consumer, message_id FROM watermill_inbox`, "the view v"},
		"a child":                    {`CREATE TABLE child () INHERITS (watermill_inbox)`, "inherits"},
		"a foreign key":              {`CREATE TABLE other (consumer text, message_id text, FOREIGN KEY (consumer, message_id) REFERENCES watermill_inbox)`, "the foreign key"},
		"a constraint not validated": {`ALTER TABLE watermill_inbox ADD CONSTRAINT mine CHECK (consumer <> '') NOT VALID`, "the constraint mine"},
		"a name that is taken":       {`CREATE TABLE watermill_inbox_old ()`, "42P07"},
		"hash partitions": {`DROP TABLE watermill_inbox; CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, PRIMARY KEY (consumer, message_id)) PARTITION BY HASH (message_id)`,
			"it is not partitioned by RANGE"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			repository := db.Repository(t, inboxsql.Options{})
			wantClaim(t, repository, young(1), true)
			db.MustExec(t, c.ddl)
			err := newPartitions(t, db).Convert(context.Background())
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, want %q", err, c.want)
			}
			if got := db.Count(t, `SELECT count(*) FROM pg_constraint WHERE conname LIKE 'watermill_inbox_below%'`+` AND connamespace = current_schema()::regnamespace`); got != 0 {
				t.Error("the CHECK is left")
			}
			if name != "no table" && name != "hash partitions" {
				wantClaim(t, repository, young(1), false)
				wantClaim(t, repository, young(2), true)
			}
		})
	}
}

// Grants and the owner move along, and constraints of the user's.
func TestConvertKeepsGrants(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Repository(t, inboxsql.Options{})
	role := "role_" + testdb.RandomName()
	var schema string
	if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
		t.Fatal(err)
	}
	owner := role + "_owner"
	for _, name := range []string{role, owner} {
		db.MustExec(t, `CREATE ROLE `+name+` LOGIN`)
		t.Cleanup(func() { db.MustExec(t, `DROP OWNED BY `+name+` CASCADE; DROP ROLE `+name) })
		db.MustExec(t, `GRANT USAGE, CREATE ON SCHEMA `+schema+` TO `+name)
	}
	for _, table := range []string{"watermill_inbox", "watermill_inbox_unsent"} {
		db.MustExec(t, `ALTER TABLE `+table+` OWNER TO `+owner)
	}
	// The column privileges are all that the role has to insert with, so that the claims below show that they have moved.
	db.MustExec(t, `GRANT SELECT ON watermill_inbox TO `+role+` WITH GRANT OPTION; GRANT INSERT (consumer, message_id) ON watermill_inbox TO `+role)
	db.MustExec(t, `GRANT SELECT, INSERT, UPDATE, DELETE ON watermill_inbox_unsent TO `+role)
	db.MustExec(t, `ALTER TABLE watermill_inbox ADD CONSTRAINT mine CHECK (consumer <> 'x')`)
	asRole := *db
	asRole.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+role+"@", 1)
	asRole.DB = asRole.Open(t)
	repository := asRole.RepositoryWithoutSchema(t, inboxsql.Options{})
	wantClaim(t, repository, young(1), true)
	if err := newPartitions(t, db).Convert(context.Background()); err != nil {
		t.Fatal(err)
	}
	asRole.Adapter = inboxsql.PartitionedPostgreSQLSchema{IDs: inbox.UUIDv7}
	for _, repository := range []*inboxsql.Repository{repository, asRole.RepositoryWithoutSchema(t, inboxsql.Options{})} {
		if err := repository.Check(context.Background()); err != nil {
			t.Fatal(err)
		}
		wantClaim(t, repository, young(1), false)
		wantClaim(t, repository, testdb.ID(inbox.UUIDv7, daysAgo(-2), 1), true)
		if _, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "x", MessageID: young(2)}}); err == nil || errors.Is(err, inbox.ErrTooOld) {
			t.Errorf("the user's constraint is lost: %v", err)
		}
		db.MustExec(t, `DELETE FROM watermill_inbox WHERE message_id >= $1`, inbox.UUIDv7.Bound(daysAgo(-2)))
	}
	asOwner := *db
	asOwner.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+owner+"@", 1)
	asOwner.DB = asOwner.Open(t)
	further, err := partitions.New(asOwner.DB, partitions.Options{IDs: inbox.UUIDv7, Retention: 24 * time.Hour, Ahead: 10 * 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if done := pass(t, further); len(done.Created) == 0 {
		t.Errorf("the owner's pass says %+v", done)
	}
}

// The converted table is retired as a whole, when its bound is older than the retention.
func TestAConvertedTableIsRetired(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Adapter = inboxsql.PartitionedPostgreSQLSchema{IDs: inbox.UUIDv7}
	keeper := db.Partitioned(t, partitions.Options{})
	db.MustExec(t, fmt.Sprintf(`CREATE TABLE watermill_inbox_old PARTITION OF watermill_inbox FOR VALUES FROM (MINVALUE) TO ('%s')`, inbox.UUIDv7.Bound(daysAgo(3))))
	repository := db.Repository(t, inboxsql.Options{})
	ancient := inbox.UUIDv7.Bound(time.UnixMilli(0))
	wantClaim(t, repository, ancient, true)
	wantClaim(t, repository, ancient, false)
	if done := pass(t, keeper); !slices.Equal(done.Retired, []string{"watermill_inbox_old"}) {
		t.Errorf("the pass says %+v", done)
	}
	wantRefused(t, repository, ancient, inbox.ErrTooOld)
}
